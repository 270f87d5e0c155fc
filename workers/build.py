"""ProgramBuilder: writes a model down as operations of kernels/program.py, from its ModelSpec and packed weights.

There is one forward pass for every family: what differs is a field of ModelSpec. The operations and their order are the
same in every member of a team; only the addresses are a process's own.
"""

from __future__ import annotations

from pagedserve.contract.messages import Setup
from pagedserve.models.spec import ModelSpec
from workers.arena import Arena
from workers.kernels import operations as p
from workers.kernels.linear import GELU_TANH, SILU
from workers.kernels.linear_pack import BLOCK, WTYPE_Q8_0, is_quantized
from workers.kernels.quantize import act_row_bytes
from workers.kernels.rope import PAIR_ADJACENT, PAIR_HALVES
from workers.weights import Matrix, Weights

_NORMS = {"rms": p.NORM_RMS, "layer": p.NORM_LAYER}
_ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}
_PAIRINGS = {"adjacent": PAIR_ADJACENT, "halves": PAIR_HALVES}
_PRIVATE = ("normed", "q_hidden")  # the forms of a norm's output


def private_bytes(spec: ModelSpec) -> int:
    """Bytes that a member needs for itself: what a norm gives for PRIVATE_ROWS rows, in each form."""
    return len(_PRIVATE) * _form_bytes(spec)


def _form_bytes(spec: ModelSpec) -> int:
    row_bytes = max(4 * spec.hidden_size, 2 * act_row_bytes(WTYPE_Q8_0, spec.hidden_size))  # 2: the head's terms
    return p.PRIVATE_ROWS * (-(-row_bytes // 64) * 64)


class ProgramBuilder:
    """Appends operations. Every operand is an address, every width a number of float32."""

    def __init__(self, setup: Setup, weights: Weights, arena: Arena, private: int) -> None:
        self._setup, self._weights, self._arena = setup, weights, arena
        self._private = private  # address of private_bytes of this member's own
        self._spec = weights.layout.spec
        self.ops: list[list[int]] = []
        self.numbers: list[float] = []
        self.windows: list[int] = sorted({layer.sliding_window for layer in self._spec.layers})
        self._x = self._at("x")  # the residual stream

    def body(self) -> None:
        """Embedding and layers, up to the last one's attention: every token."""
        spec = self._spec
        embed = self._weights.layout.matrices["embed"]
        self._op(p.COPY_BLOCKS, counter=1, barrier=False)
        self._op(
            p.EMBED,
            embed.wtype,
            self._matrix(embed),
            spec.hidden_size,
            self._x,
            self._vector("position_embed"),
            number=spec.embedding_scale,
        )
        for layer in range(spec.num_layers - 1):
            self._attention(layer)
            self._project(layer, "attention", "q_attention")
            self._feed_forward(layer)
        self._attention(spec.num_layers - 1, sampled_only=True)

    def tail(self) -> None:
        """What is left of the last layer, final norm, head and sampling: only the rows that sample, LOGITS_ROWS of them
        at a time."""
        spec, matrices = self._spec, self._weights.layout.matrices
        last = spec.num_layers - 1
        width, quantized = spec.num_heads * spec.head_dim, self._quantizes_by_tiles(last)
        self._op(
            p.GATHER,
            self._x,
            4 * spec.hidden_size,
            self._at("sampled_x"),
            self._at("q_attention" if quantized else "attention"),
            act_row_bytes(WTYPE_Q8_0, width) if quantized else 4 * width,
            self._at("q_sampled_attention" if quantized else "sampled_attention"),
        )
        self._x = self._at("sampled_x")
        self._project(last, "sampled_attention", "q_sampled_attention")
        self._feed_forward(last)
        head = matrices["embed" if spec.tied else "head"]
        # Logits decide by small differences: int8 activations alone would be a quarter of all noise there.
        num_terms = 2 if is_quantized(head.wtype) else 1
        self._norm("final_norm", [head], num_terms=num_terms)
        self._linear(head, "", "normed", "q_hidden", self._at("logits"), self._logits_width, num_terms=num_terms)
        self._op(
            p.SAMPLE,
            self._at("logits"),
            self._logits_width,
            spec.vocab_size,
            self._at("logprobs"),
            self._at("ranks"),
            self._at("top_ids"),
            self._at("top_logprobs"),
        )

    def link(self) -> None:
        """Say of each operation where the next matrix is read; behind the last one it is the first of another pass."""
        linear = [index for index, op in enumerate(self.ops) if op[p.CODE] in (p.LINEAR, p.GATED)]
        for index, op in enumerate(self.ops):
            op[p.NEXT] = next((place for place in linear if place > index), linear[0])

    @property
    def _logits_width(self) -> int:
        return -(-self._spec.embedding_rows // 16) * 16

    def _attention(self, layer: int, *, sampled_only: bool = False) -> None:
        spec, matrices = self._spec, self._weights.layout.matrices
        prefix = f"layers.{layer}."
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        width = q_width + 2 * kv_width
        begins = {"qkv": 0, "q": 0, "k": q_width, "v": q_width + kv_width}
        parts = {name: matrices[prefix + name] for name in begins if prefix + name in matrices}
        self._norm(prefix + "attn_norm", list(parts.values()))
        for counter, (name, matrix) in enumerate(parts.items()):
            out = self._at("qkv") + 4 * begins[name]
            last = counter == len(parts) - 1
            self._linear(matrix, prefix + name, "normed", "q_hidden", out, width, counter=counter, barrier=last)
        cos, sin, rope_dim, pairing = self._rope(layer)
        self._op(
            p.QK_ROPE_WRITE,
            layer,
            self._at("qkv"),
            width,
            cos,
            sin,
            rope_dim,
            pairing,
            self._vector(prefix + "q_norm"),
            self._vector(prefix + "k_norm"),
            spec.num_heads,
            number=spec.norm_eps,
        )
        window = spec.layers[layer].sliding_window
        attention, num_heads, index = self._at("attention"), spec.num_heads, self.windows.index(window)
        result = attention, num_heads, index, self._at("q_attention") if self._quantizes_by_tiles(layer) else 0
        self._op(p.ATTENTION, layer, self._at("qkv"), width, *result, int(sampled_only), number=spec.scale)
        self._op(p.COMBINE, *result, int(sampled_only))

    def _quantizes_by_tiles(self, layer: int) -> bool:
        """Whether attention's tiles quantise what they write: one kv_head's query heads are whole blocks of the row."""
        spec, o = self._spec, self._weights.layout.matrices[f"layers.{layer}.o"]
        return is_quantized(o.wtype) and spec.num_heads // spec.num_kv_heads * spec.head_dim % BLOCK == 0

    def _project(self, layer: int, source: str, quantized: str) -> None:
        """x += o(attention)."""
        prefix = f"layers.{layer}."
        o = self._weights.layout.matrices[prefix + "o"]
        if is_quantized(o.wtype) and not self._quantizes_by_tiles(layer):
            self._op(p.QUANTIZE, self._at(source), o.n_in, self._at(quantized))
        self._residual(o, prefix + "o", source, quantized, prefix + "attn_post_norm")

    def _feed_forward(self, layer: int) -> None:
        spec, matrices = self._spec, self._weights.layout.matrices
        prefix = f"layers.{layer}."
        parts = [matrices[prefix + name] for name in ("gate", "up") if prefix + name in matrices]
        down = matrices[prefix + "down"]
        self._norm(prefix + "ffn_norm", parts)
        fits = is_quantized(down.wtype) and spec.intermediate_size % BLOCK == 0
        biased = self._bias(prefix + "gate") or self._bias(prefix + "up")
        if spec.gated and fits and not biased and is_quantized(parts[0].wtype) and parts[0].wtype == parts[1].wtype:
            gate, up = parts
            self._op(
                p.GATED,
                gate.wtype,
                self._matrix(gate),
                gate.n_in,
                gate.n_out,
                self._at("q_hidden"),
                act_row_bytes(gate.wtype, gate.n_in),
                self._private_at("q_hidden"),
                self._matrix(up),
                _ACTIVATIONS[spec.activation],
                self._at("q_activated"),
                act_row_bytes(down.wtype, down.n_in),
            )
        else:
            self._gate_up_activate(prefix, parts, down)
        self._residual(down, prefix + "down", "activated", "q_activated", prefix + "ffn_post_norm")

    def _gate_up_activate(self, prefix: str, parts: list[Matrix], down: Matrix) -> None:
        spec = self._spec
        width = len(parts) * spec.intermediate_size
        names = [prefix + "gate", prefix + "up"][-len(parts) :]
        for place, (name, matrix) in enumerate(zip(names, parts, strict=True)):
            out = self._at("gate_up") + 4 * place * spec.intermediate_size
            last = place == len(parts) - 1
            self._linear(matrix, name, "normed", "q_hidden", out, width, counter=place, barrier=last)
        self._op(
            p.ACTIVATE,
            _ACTIVATIONS[spec.activation],
            int(spec.gated),
            self._at("gate_up"),
            width,
            spec.intermediate_size,
            self._at("activated"),
            self._at("q_activated") if is_quantized(down.wtype) else 0,
        )

    def _residual(self, matrix: Matrix, name: str, source: str, quantized: str, post_norm: str) -> None:
        """x += matrix(source), with a norm before the addition where the family has one."""
        x, hidden = self._x, self._spec.hidden_size
        if not self._spec.post_norms:
            self._linear(matrix, name, source, quantized, x, hidden, residual=x)
            return
        self._linear(matrix, name, source, quantized, self._at("output"), hidden)
        self._op(
            p.NORM,
            _NORMS[self._spec.norm],
            self._at("output"),
            x,
            0,
            self._vector(post_norm),
            self._vector(post_norm + ".bias"),
            hidden,
            x,
            number=self._spec.norm_eps,
        )

    def _norm(self, name: str, consumers: list[Matrix], *, num_terms: int = 1) -> None:
        """The residual stream's norm, in the form or forms that its consumers read."""
        quantized = any(is_quantized(matrix.wtype) for matrix in consumers)
        self._op(
            p.NORM,
            _NORMS[self._spec.norm],
            self._x,
            0 if all(is_quantized(matrix.wtype) for matrix in consumers) else self._at("normed"),
            self._at("q_hidden") if quantized else 0,
            self._vector(name),
            self._vector(name + ".bias"),
            self._spec.hidden_size,
            0,
            num_terms,
            self._private_at("normed"),
            self._private_at("q_hidden") if quantized else 0,
            number=self._spec.norm_eps,
        )

    def _linear(
        self,
        matrix: Matrix,
        name: str,
        source: str,
        quantized: str,
        out: int,
        out_width: int,
        *,
        residual: int = 0,
        counter: int = 0,
        barrier: bool = True,
        num_terms: int = 1,
    ) -> None:
        self._op(
            p.LINEAR,
            matrix.wtype,
            self._matrix(matrix),
            matrix.n_in,
            matrix.n_out,
            self._at(quantized if is_quantized(matrix.wtype) else source),
            act_row_bytes(matrix.wtype, matrix.n_in),
            self._private_at(quantized if is_quantized(matrix.wtype) else source),
            out,
            out_width,
            self._bias(name),
            residual,
            num_terms,
            counter=counter,
            barrier=barrier,
        )

    def _rope(self, layer: int) -> tuple[int, int, int, int]:
        """cos, sin, rope_dim and pairing of a layer; zeros where positions are learned."""
        if not self._spec.ropes:
            return 0, 0, 0, 0
        index = self._spec.layers[layer].rope
        rope = self._spec.ropes[index]
        tables = self._vector(f"rope.{index}.cos"), self._vector(f"rope.{index}.sin")
        return *tables, 2 * len(rope.inv_freq), _PAIRINGS[rope.pairing]

    def _op(
        self,
        code: int,
        *arguments: int,
        number: float = 0.0,
        counter: int = 0,
        barrier: bool = True,
    ) -> None:
        row = [code, counter, int(barrier), 0, *arguments]
        self.ops.append(row + [0] * (p.OP_COLUMNS - len(row)))
        self.numbers.append(number)

    def _at(self, name: str) -> int:
        return self._arena.address(name)

    def _private_at(self, name: str) -> int:
        """This member's own place for a norm's output of few rows; 0 for what is no norm's output."""
        return self._private + _PRIVATE.index(name) * _form_bytes(self._spec) if name in _PRIVATE else 0

    def _matrix(self, matrix: Matrix) -> int:
        return self._weights.address + matrix.offset

    def _vector(self, name: str) -> int:
        """Address of a vector; 0 when the model has none of this name."""
        vector = self._weights.layout.vectors.get(name)
        return 0 if vector is None else self._weights.address + vector.offset

    def _bias(self, name: str) -> int:
        return self._vector(name + ".bias") if name else 0
