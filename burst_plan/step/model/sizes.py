"""The sizes of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, fields

from burst_plan.machines import HEAD_DIMS
from burst_plan.step.model.mixers import NONE, Mixer

LARGEST = 2**31
"""The largest legal size of a model."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder's sizes. Raises ValueError for an illegal size."""

    name: str = "model"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Head dim of queries and keys."""
    value_dim: int
    ffn: int
    """Width of a dense MLP."""
    vocab: int
    gated: bool = True
    """Whether an MLP has a gate: three matrices, else two."""
    tied: bool = False
    """Whether embedding and LM head are one matrix."""
    experts: int = 0
    """Routed experts of a layer; 0 for a dense model."""
    active: int = 0
    """Routed experts per token."""
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Width of all shared experts together."""
    shared_gate: bool = False
    """Whether a token has a gate for its shared experts."""
    dense_layers: int = 0
    """Layers without experts, of a model that has experts."""
    q_rank: int = 0
    """Latent width of queries (MLA); 0: none."""
    kv_rank: int = 0
    """Latent width of keys and values (MLA); 0: no MLA."""
    rope_dim: int = 0
    """Part of `head_dim` that all heads share, of MLA."""
    qk_norm: bool = False
    """Whether each head of queries and of keys has a norm."""
    window: int = 0
    """Window of some layers in tokens, with the current token; 0: no layer has a window."""
    windowed: int = 0
    """Layers with this window."""
    gates: int = 0
    """Gates of attention's output per head: 1, or the head dim; 0: none."""
    sandwich: bool = False
    """Whether a norm also follows each mixer and each MLP."""
    biases: int = 0
    """Parameters of biases around attention and in MLPs, in families whose biases are counted."""
    copies: int = 0
    """Copies of attention with its MLP, if layers share them in turn (Zamba); 0: each layer has its own."""
    wider: int = 0
    """Columns that attention reads in addition to the hidden states."""
    beside: int = 0
    """Parameters of each layer alone, if attention is shared."""
    without_attention: int = 0
    without_mlp: int = 0
    """Layers without an MLP; layers with an MLP have neither attention nor a mixer then."""
    mixer: Mixer = NONE
    """Layers with a recurrence or a short convolution, instead of attention or in parallel with it."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type != "int":
                continue
            least = 0 if field.default == 0 else 1
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
                raise ValueError(
                    f"{field.name} of a model must be an integer from {least} to {LARGEST}, got {value!r}"
                )
        if (wide := max(self.head_dim, self.value_dim)) > HEAD_DIMS[-1]:
            raise ValueError(f"kernels of attention support heads of at most {HEAD_DIMS[-1]}, got {wide}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads: {self.heads} query heads do not group over {self.kv_heads} K/V "
                "heads"
            )
        if self.experts and self.dense_layers >= self.layers:
            raise ValueError(f"none of the {self.layers} layers has experts: {self.dense_layers} are dense")
        if self.experts and not (0 < self.active <= self.experts and self.expert_ffn):
            raise ValueError(
                f"a model with {self.experts} experts needs their width and how many serve a token, got "
                f"{self.expert_ffn} and {self.active}"
            )

    @property
    def projections(self) -> int:
        """Parameters of the projections of attention, in a layer that has it."""
        out = (self.value_dim + self.gates) * self.heads * self.hidden + self.beside
        if not self.kv_rank:
            columns = (self.heads + self.kv_heads) * self.head_dim + self.kv_heads * self.value_dim
            return out + (self.hidden + self.wider) * columns
        queries = self.heads * self.head_dim
        q = self.hidden * queries if not self.q_rank else self.q_rank * (self.hidden + queries)
        up = self.heads * (self.head_dim - self.rope_dim + self.value_dim)
        return out + q + self.hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * up

    @property
    def attending(self) -> int:
        """Layers with attention."""
        return self.layers - self.without_attention

    @property
    def mixing(self) -> int:
        """Parameters of all matrices around attention, recurrences and convolutions."""
        return self.attending * self.projections + self.mixer.layers * self.mixer.matrices

    @property
    def blocks(self) -> int:
        """Mixers and MLPs with a norm before each, of all layers."""
        alone = max(0, self.without_attention - self.mixer.layers)
        return 2 * self.layers - self.without_mlp - alone

    def mlp(self, width: int) -> int:
        """Parameters of an MLP of this width."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.sparse_layers * self.experts * self.mlp(self.expert_ffn)

    @property
    def mlp_active(self) -> int:
        """Parameters of the MLPs that a token passes, of all layers."""
        dense = (self.layers - self.sparse_layers - self.without_mlp) * self.mlp(self.ffn)
        each = self.active * self.mlp(self.expert_ffn) + self.mlp(self.shared_ffn)
        return dense + self.sparse_layers * (each + self.hidden * (self.experts + self.shared_gate))

    @property
    def mlp_first(self) -> float:
        """The parameters of `mlp_active` that multiply the input of an MLP."""
        return self.mlp_active * (2 / 3 if self.gated else 1 / 2)

    @property
    def head(self) -> int:
        """Parameters of the LM head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        idle = self.sparse_layers * (self.experts - self.active) * self.mlp(self.expert_ffn)
        norms = (self.blocks * (1 + self.sandwich) + 1) * self.hidden + self.attending * (
            self.q_rank + self.kv_rank + 2 * self.head_dim * self.qk_norm + self.wider
        )
        embeddings = self.head * (1 if self.tied else 2)
        others = self.mixer.layers * self.mixer.others + self.biases
        block = self.projections - self.beside + self.mlp(self.ffn) + 2 * self.hidden + self.wider
        copies = block * (self.attending - self.copies) * (self.copies > 0)
        return self.mixing + self.mlp_active + idle + norms + embeddings + others - copies

    @property
    def width(self) -> int:
        """Columns of the MLPs that a token passes in the widest layer."""
        return max(self.ffn if self.dense_layers or not self.experts else 0,
                   self.active * self.expert_ffn + self.shared_ffn)  # fmt: skip

    def mask(self, seq: int) -> str:
        """Return the mask of its layers as an expression: a window if every layer has it, else causal."""
        whole = self.windowed == self.attending and 0 < self.window < seq
        return f"window:{self.window}" if whole else "causal"

    def flops(self, keys: float) -> float:
        """Return the FLOPs of a token in training, without recomputation; keys: its mean number of keys."""
        pairs = self.attending * self.heads * (self.head_dim + self.value_dim) * keys
        mixed = self.mixer.layers * self.mixer.multiplied
        return 6.0 * (self.attending * self.projections + self.mlp_active + self.head + pairs + mixed)
