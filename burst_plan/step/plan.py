"""A plan to run a step: parallelism by degree, tensors saved for backward, and the place of states."""

from __future__ import annotations

from dataclasses import dataclass

from burst_mcore.attention.geometry.shard import Ranks
from burst_plan.step.model import Model

FRAMEWORKS = ("megatron", "deepspeed")
NOT_EXPRESSIBLE = "not expressible: DeepSpeed's JSON has no section for expert parallelism"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan to run a step on the ranks of a cluster."""

    framework: str = "megatron"
    tp: int = 1
    """Ranks that share matrices, and slice sequences among them (sequence parallelism)."""
    cp: int = 1
    """Ranks that share a sequence."""
    pp: int = 1
    dp: int = 1
    ep: int = 1
    """Ranks among the dp x cp ranks that share the experts of a layer; TP shares the matrices of each."""
    chunks: int = 1
    """Model chunks of a pipeline stage: above 1 the schedule is interleaved."""
    zero: int = 1
    """ZeRO's stage over the dp x cp ranks; 1 is Megatron's distributed optimizer, 3 also FSDP."""
    recompute: str = "none"
    """As `burst_mcore.checkpointing`; full, attention (is kept), segment (the suffix's attention is kept)."""
    keep: float = 1.0
    """For "segment": the share of the sequence whose attention is kept."""
    offload_optimizer: bool = False
    offload_activations: bool = False
    """Whether O and LSE that a recompute policy keeps are offloaded to host memory."""
    offload_inputs: bool = False
    """Whether the inputs of recomputed layers are offloaded to host memory."""
    chunked: bool = False
    """Whether Q, K, V and O are offloaded to host memory by chunks, with two on the GPU, as in FPDT.

    No copy is counted. By arithmetic, a chunk of 64K tokens takes eight times as long to compute at 200
    TFLOP/s as to copy at 25 GB/s."""
    tiled: bool = False
    """Whether an MLP goes tile by tile, and saves nothing: backward recomputes its first products."""
    fused_loss: bool = True
    local: bool = False
    """Whether norms and SwiGLU of Megatron are torch's operators, as in its local spec, instead of fused."""
    micro: int = 1
    """Micro-batches of a step, of one sequence each."""

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def sharded(self) -> int:
        """Ranks over which ZeRO shards."""
        return self.dp * self.cp

    @property
    def modules(self) -> str:
        """The name of its layers' modules, in `burst_plan.step.parts.MODULES`."""
        return f"{self.framework}, local" if self.local else self.framework

    @property
    def recomputes(self) -> bool:
        """Whether backward recomputes layers, except for kept attention."""
        return self.recompute != "none"

    @property
    def kept(self) -> float:
        """The share of the sequence whose attention is not recomputed."""
        return {"none": 1.0, "full": 0.0, "attention": 1.0, "segment": self.keep}[self.recompute]

    def ring(self, cluster: Ranks) -> Ranks:
        """Return the ranks that share a sequence."""
        return self.neighbours(self.cp, cluster)

    def neighbours(self, ranks: int, cluster: Ranks) -> Ranks:
        """Return a group of so many ranks, and how many of them a node holds beside tensor parallelism."""
        return Ranks(ranks, min(ranks, max(1, cluster.intra // self.tp)))

    def __str__(self) -> str:
        words = [self.framework, f"CP {self.cp}"]
        degrees = (("TP", self.tp), ("PP", self.pp), ("DP", self.dp), ("EP", self.ep))
        words += [f"{name} {n}" for name, n in degrees if n > 1]
        words += [f"{self.chunks} chunks"] * (self.chunks > 1)
        words += [f"ZeRO-{self.zero}", f"recompute {self.recompute}"]
        words += [f"keep {self.keep:g}"] * (self.recompute == "segment")
        words += [name for name, on in (("offload optimizer", self.offload_optimizer),
                                        ("offload activations", self.offload_activations),
                                        ("offload inputs", self.offload_inputs),
                                        ("chunks of attention on the host", self.chunked),
                                        ("tiled MLP", self.tiled),
                                        ("whole logits", not self.fused_loss)) if on]  # fmt: skip
        return ", ".join(words)


def why_not(plan: Plan, model: Model, seq: int, cluster: Ranks) -> str | None:
    """Return why ranks cannot run a plan; None if they can. Memory is checked elsewhere."""
    if plan.gpus != cluster.size:
        return f"{plan.gpus} ranks of the plan are not the {cluster.size} of the cluster"
    if model.mixer.layers and plan.framework == "megatron":
        return f"layers with a {model.mixer.kind} are Megatron's own there: their exchange is not predicted"
    if not model.attending and plan.recompute in ("attention", "segment"):
        return f"recompute {plan.recompute} keeps attention, which no layer has"
    reason = _why_not_matrices(plan, model, cluster) or _why_not_experts(plan, model, cluster)
    if reason is not None:
        return reason
    if model.layers % (plan.pp * plan.chunks):
        return f"{plan.pp} stages x {plan.chunks} chunks do not divide {model.layers} layers"
    intra = plan.ring(cluster).intra
    if plan.cp % intra:
        return f"CP {plan.cp} does not go evenly on nodes with {intra} of its ranks"
    if plan.cp * plan.tp > 1 and seq < 2 * plan.cp * plan.tp:
        return f"{seq} tokens are too few for CP {plan.cp} x TP {plan.tp}"
    if plan.chunks > 1 and plan.pp == 1:
        return f"{plan.chunks} chunks of a stage need a pipeline: PP is 1"
    if plan.micro % plan.pp and plan.chunks > 1:
        return f"interleaving needs micro-batches ({plan.micro}) in multiples of the stages ({plan.pp})"
    return None


def _why_not_matrices(plan: Plan, model: Model, cluster: Ranks) -> str | None:
    """Return why ranks cannot share the matrices of a model; None if they can."""
    if cluster.intra % plan.tp and plan.tp % cluster.intra:
        return f"TP {plan.tp} does not go evenly on nodes of {cluster.intra}"
    if model.heads % plan.tp or (model.kv_heads % plan.tp and plan.tp % model.kv_heads):
        return f"TP {plan.tp} does not divide {model.heads} heads and {model.kv_heads} K/V heads"
    if model.ffn % plan.tp:  # Megatron pads the vocabulary
        return f"TP {plan.tp} does not divide an MLP of {model.ffn}"
    if model.expert_ffn % plan.tp or model.shared_ffn % plan.tp:
        return f"TP {plan.tp} does not divide experts of {model.expert_ffn} and {model.shared_ffn}"
    return None


def _why_not_experts(plan: Plan, model: Model, cluster: Ranks) -> str | None:
    """Return why ranks cannot share experts in a plan; None if they can."""
    if plan.ep == 1:
        return None
    if plan.framework == "deepspeed":
        return NOT_EXPRESSIBLE
    if not model.experts:
        return f"EP {plan.ep} is for a model with experts: there are none"
    if model.experts % plan.ep:
        return f"EP {plan.ep} does not divide {model.experts} experts"
    if plan.sharded % plan.ep:
        return f"EP {plan.ep} does not divide the CP {plan.cp} x DP {plan.dp} ranks"
    intra = plan.neighbours(plan.ep, cluster).intra
    return f"EP {plan.ep} does not go evenly on nodes with {intra} of its ranks" if plan.ep % intra else None
