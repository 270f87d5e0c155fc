"""The benchmark: kernels by themselves, the server under load, two results side by side. Nothing imports it."""
