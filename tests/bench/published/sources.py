"""Figures as their sources print them, in rows that `burst-mcore plan --against` reads.

benchmarks/public/paper.json has the rows of the BurstEngine paper, which `public_rows` makes of its results.
These results and rows of other engines' steps lie beside the repository. What a source
leaves open is assumed once for all rows of a method; the assumptions stand beside the methods.
"""

import json
import re
from dataclasses import MISSING, asdict, fields

from predictions import COUNTED

from burst_bench.published.training import FLAT
from burst_plan.machines import MACHINES
from burst_plan.step.model import PRESETS, Model
from burst_plan.step.way import Way
from burst_plan.words import tokens

PAPER = {
    # "Megatron does not provide FSDP implementation and optimizer offloading"
    "megatron-cp": ("ring", {"zero": 0, "framework": "megatron", "recompute": "full", "fused_loss": False}),
    # "DeepSpeed-Ulysses has FSDP and optimizer offloading"
    "deepspeed-ulysses": ("ulysses", {"recompute": "full", "fused_loss": False, "offload_optimizer": True}),
    # "All evaluations are conducted with gradient checkpointing": full, an assumption for these two
    "double-ring": ("double-ring", {"recompute": "full", "fused_loss": False}),
    "usp": ("usp", {"recompute": "full", "fused_loss": False}),
    "burst selective++": ("burst", {"framework": "bmtrain", "recompute": "attention"}),
    "burst segment 0.5": ("burst", {"framework": "bmtrain", "recompute": "segment", "keep": 0.5}),
    "burst-usp selective++": ("loongtrain", {"framework": "bmtrain", "recompute": "attention"}),
}
"""Of the BurstEngine paper. FSDP everywhere but in Megatron-CP."""
RENAMED = {"megatron-cp": "ring"}
"""Names of methods in the paper that have another name here."""
VARIANTS = {"usp": "zigzag"}
"""LoongTrain's ring between nodes is that of ring-flash-attention."""
ENDS = {"tgs": "tokens per second per GPU", "mem_gb": "mem_gb"}


def _sizes(model):
    """The fields of a row's model: no row is of a hybrid."""
    return {name: value for name, value in asdict(model).items() if name != "mixer"}


def public_rows(paper):
    """Return the rows of benchmarks/public/paper.json: fields that have their default are left out."""
    return [_short(row, _source(row)) for row in (*paper.attention(), *paper.steps())]


def _short(row, source):
    if "way" not in row:
        return {**{name: value for name, value in row.items() if value != ""}, "source": source}
    model, way = _changed(row["model"], Model), _changed(row["way"], Way)
    return {"pass": "train", "source": source, **row, "model": model, "way": way}


def _changed(values, kind):
    """Return the values that differ from the defaults of a data class."""
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    return {name: value for name, value in values.items() if value != defaults.get(name, MISSING)}


def _source(row):
    """Return the table or figure of the paper, by the row's name; other engines have a group of their own."""
    section, *method = row.get("name", "attention of 32 GPUs").replace("_14b", "").split("/")
    engine = "engine" if (method or [""])[0].startswith("burst") else "other engines"
    words = {
        "ablation": "ablation of 14B",
        "end_to_end": f"end to end, its {engine}" if engine == "engine" else f"end to end, {engine}",
        "inter_node": "2, 4 and 8 nodes",
        "intra_node": "one node",
        "sparse": "masks on one node",
    }
    return f"BurstEngine, {words.get(section, section)}"


class Paper:
    """The figures in a file of the paper's results: rows of attention, and of training steps."""

    def __init__(self, path):
        self.results = json.loads(path.read_text())
        self.gpu, self.per_node = (self.results["hardware"][name] for name in ("gpu", "gpus_per_node"))
        self.hardware = next(name for name in MACHINES if self.gpu.startswith(name))

    def attention(self):
        """Yield rows of attention."""
        for section, table in self.results.items():
            match = re.fullmatch(r"attention_tflops_(\d+)gpu_(\w+)_heads", section)
            for method, values in table.items() if match else ():
                model = self.results["models"][match[2]]
                for seq, measured in zip(table["seq"], values, strict=True):
                    if method != "seq" and measured is not None:
                        yield {
                            "hardware": self.hardware, "gpus": int(match[1]), "gpus_per_node": self.per_node,
                            "heads": model["heads"], "kv_heads": model["kv_heads"],
                            "head_dim": model["hidden"] // model["heads"], "batch": 1, "seq": seq,
                            "mask": "causal", "passes": "fwd+bwd", "method": RENAMED.get(method, method),
                            "variant": VARIANTS.get(method, ""), "tflops": measured,
                        }  # fmt: skip

    def steps(self):
        """Yield rows of training; "value" is None where memory did not suffice."""
        for entry in self.results.get("end_to_end", ()):
            for name, values in entry.items():
                if name != "method":
                    model, seq, gpus = name.split("_")
                    run = self._run(model, tokens(seq), int(gpus), entry["method"])
                    figures = dict(zip(ENDS, values or (None, None), strict=True))
                    if values is not None and figures["mem_gb"] is None:
                        del figures["mem_gb"]
                    yield from self._rows(f"end_to_end/{entry['method']}/{name}", run, figures)
        for entry in self.results.get("ablation_14b_1M_32", ()):
            yield from self._rows("ablation", self._ablated(entry), entry)
        for section in ("inter_node_14b", "intra_node_14b"):
            for entry in self.results.get(section, ()):
                yield from self._rows(section, self._of_14b(entry), entry)
        for name, value in self.results.get("sparse_tgs_256K", {}).items():
            mask = {"causal balanced": "causal", "masked dense": "full"}.get(name)
            if mask is not None:  # of others the balance of their blocks is not given
                run = self._of_14b({"seq": "256K", "cp": self.per_node})
                yield from self._rows(f"sparse/{name}", {**run, "mask": mask}, {"tgs": value})

    def _rows(self, name, run, figures):
        for short, metric in ENDS.items():
            if short in figures:
                yield {**run, "name": name, "metric": metric, "value": figures[short]}

    def _run(self, model, seq, gpus, method, **changes):
        attention, settings = PAPER[method.split(" (")[0]]
        sizes = dict(self.results["models"][model])
        dim = sizes["hidden"] // sizes["heads"]
        way = Way(**{"framework": "deepspeed", "zero": 3, "cp": gpus, **settings, **changes})
        return {
            "pass": "train", "hardware": self.hardware, "gpus": gpus, "gpus_per_node": self.per_node,
            "model": _sizes(Model(name=model, head_dim=dim, value_dim=dim, **sizes)), "seq": seq,
            "method": attention, "way": asdict(way),
        }  # fmt: skip

    def _of_14b(self, entry):
        """Return the run of several nodes, or of one node: there the optimizer is on the host."""
        gpus, one_node = entry.get("nodes", 1) * self.per_node, {}
        if "cp" in entry:
            one_node = {"cp": entry["cp"], "dp": gpus // entry["cp"], "offload_optimizer": True}
        return self._run(
            "14b", tokens(entry["seq"].replace("0.5M", "512K")), gpus, "burst selective++", **one_node
        )

    def _ablated(self, entry):
        """Return a run of the ablation: one ring or two, which side rotates, the loss, and the recompute."""
        methods = {(0, 0): "ring", (1, 0): FLAT, (0, 1): "double-ring", (1, 1): "burst"}
        word = {"selective++": "attention"}.get(entry["recompute"], entry["recompute"])
        changes = {
            "fused_loss": entry["fused_loss"],
            "recompute": word,
            "keep": 0.5 if word == "segment" else 1.0,
        }
        run = self._run("14b", 2**20, 32, "burst selective++", **changes)
        return {**run, "method": methods[entry["backward"], entry["topology"]]}


MODELS = {
    "Llama2-7B": "llama2-7b",
    "Llama-8B": "llama3-8b",
    "Llama3-8B": "llama3-8b",
    "Llama3-70B": "llama3-70b",
    "GPT 2.7B": "gpt-2.7b",
    "GPT 6.7B": "gpt-6.7b",
    "GPT 13B": "gpt-13b",
    "GPT 30B": "gpt-30b",
}
HARDWARE = {"H100": ("H100", 8), "A100 80GB": ("A100-NVLink", 8), "A100": ("A100-quad", 4)}
"""Words of a source: the machine, and GPUs of a node.

The A100s of DeepSpeed's chart are taken to have 80 GB, an assumption: their source names 40."""
FITTED = (
    {"model": "llama3-70b", "method": "DeepSpeed Ulysses", "seq": 32768},
    {"model": "llama3-8b", "method": "FPDT (Ulysses-Offload)", "seq": 2097152},
)
"""Rows that are not judged: the network of A100-quad is fitted to one, the other tells `COUNTED`."""
CHART = "DeepSpeed blogs/ulysses-offload"
"""How the rows of DeepSpeed's chart name their source."""
_INPUTS = {"offload_inputs": True}  # `--checkpoint-in-cpu` of its tutorial; of Megatron-SP an assumption
_TILED = {**_INPUTS, "tiled": True, "fused_loss": True}
_OPTIMIZER = {"offload_optimizer": True}
RUNS = {
    "Megatron-SP": ("ulysses", "", "tp", {"framework": "megatron", "zero": 1, **_INPUTS}),
    "DeepSpeed Ulysses": ("ulysses", "", "cp", {"framework": "megatron-deepspeed", **_INPUTS}),
    "FPDT": ("ulysses", "", "cp", {"framework": "megatron-deepspeed", "chunked": True, **_TILED}),
    # Of EasyContext: its ring is that of zhuzilin/ring-flash-attention.
    "ring attention, ZeRO-3 offload": ("ring", "zigzag", "cp", _OPTIMIZER),
    "data parallel, ZeRO-3 offload": ("ring", "zigzag", "dp", _OPTIMIZER),
    # With Liger's kernels, as its tutorial has it.
    "ALST": ("ulysses", "", "cp", {"framework": "liger-deepspeed", **_TILED, **_OPTIMIZER}),
}
"""By the first words of a method: attention, its variant, the degree that takes all GPUs, other settings."""


def row_of_words(entries):
    """Return a row of words as a row of its way, or the reason why the way is not modelled."""
    name, method = entries["model"]["name"], entries["method"]
    if "8" in entries["model"].get("dtype", ""):
        return "products in 8 bits are not modelled"
    hardware, per_node = next(place for words, place in HARDWARE.items() if words in entries["hardware"])
    attention, variant, degree, settings = next(
        run for words, run in RUNS.items() if method.startswith(words)
    )
    whole = {"framework": "deepspeed", "zero": 3, "recompute": "full", "fused_loss": False}
    return {
        "pass": "train", "source": entries["source"],
        "of_source": {"hardware": entries["hardware"], "model": name, "method": method},
        "hardware": hardware, "gpus": entries["gpus"], "gpus_per_node": per_node,
        "model": _sizes(PRESETS[MODELS[name]]), "seq": entries["seq"],
        "method": attention, "variant": variant,
        "way": asdict(Way(**{**whole, degree: entries["gpus"], **settings})),
        "counted": COUNTED if CHART in entries["source"] else 1.0,
        "metric": entries["metric"], "value": entries["value"],
    }  # fmt: skip


def fitted(row):
    """Return whether a row is one of `FITTED`."""
    named = {"model": row["model"]["name"], "method": row["of_source"]["method"], "seq": row["seq"]}
    return named in FITTED
