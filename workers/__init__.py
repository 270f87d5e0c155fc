"""The computing plane: stateless worker processes that run one StepPlan at a time, all together."""
