"""Known machines: specifications of GPUs and their links, and the rates that follow."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from burst_mcore.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Numbers that no data sheet gives and that all GPUs share."""

    fill: float = 300.0
    """`Rates.fill`, keys: a kernel of a few hundred keys is half as fast as a kernel of many thousands.
    Public rows of attention do not tell 300 from 100 or 450."""
    call: float = 0.15e-3
    """`Rates.call`, seconds, at most: tests hold a step on a CPU to it, without kernels and messages."""
    loops: float = 0.456e-3
    """Seconds of a step of other projects' loops on top of the device's, fitted to public rows. They are
    launches by hosts, and terms outside the model. Collectives of TP and EP are assumed to need as much."""
    links: float = 0.85
    """Share of a specified rate that messages reach over NVLink and network cards: an assumption. Public rows
    of attention do not tell it from 1."""
    latency: float = 10e-6
    """`Rates.latency`, seconds: assumed. From 2 to 30 us the median error moves by less than a point."""
    slowdown: float = 0.06
    """`Rates.slowdown`: 8 thread blocks of NCCL (`BurstConfig.max_ctas`) on 132 multiprocessors."""
    products: float = 0.7
    """Share of `Machine.tflops` that products of matrices reach in a training step: an assumption."""
    host_link: float = 25e9
    """Bytes a second between a GPU and its host, an assumption: PCIe 4 of 16 lanes, less its overhead."""
    host_memory: float = 20e9
    """Bytes a second of host memory for each GPU, in Adam on the host, an assumption: 8 share 160 GB/s."""


CONSTANTS = Constants()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of GPU and its links as their makers specify them, with two numbers that were fitted."""

    name: str
    tflops: float
    """Dense products in 16 bits, 10**12 FLOPs a second."""
    multiprocessors: int
    tiles: tuple[int, int] = (256, 128)
    """Rows that flash kernels work on at once on a multiprocessor: queries in forward, keys in backward."""
    exponentials: float
    """10**12 a second: 16 a clock and multiprocessor."""
    memory_rate: float
    """10**9 bytes a second."""
    memory: float
    """Bytes."""
    capability: int
    """Major compute capability."""
    link: float
    """10**9 bytes a second in one direction: all NVLinks of a GPU, or its PCIe lanes."""
    switched: bool = True
    """Whether NVLink joins the GPUs of a node; else PCIe does."""
    nic: float
    """10**9 bytes a second in one direction, of a GPU's network card."""
    node: int = 8
    """GPUs of a node."""
    forward: float
    """Share of `tflops` that flash kernels reach in forward, on top of exponentials and `Constants.fill`."""
    backward: float
    """The same in backward. For an A100 no public row gives it: set by hand to match the paper's rows."""
    reached: float = 1.0
    """Share of `link` that messages reach over PCIe."""
    crowding: float = 0.0
    """`Rates.crowding`, of PCIe."""

    @property
    def fitted(self) -> tuple[str, str]:
        """The names of the two numbers that are fitted to measurements of this machine."""
        return ("forward", "backward") if self.switched else ("reached", "crowding")

    @property
    def rates(self) -> Rates:
        """Return the rates by which "auto" chooses."""
        return self.rates_by(CONSTANTS)

    def rates_by(self, constants: Constants) -> Rates:
        """Return the rates with other constants."""
        return Rates(
            intra=self.link * (constants.links if self.switched else self.reached) * 1e9,
            inter=self.nic * constants.links * 1e9,
            compute=self.tflops * self.forward * 1e12,
            backward=self.tflops * self.backward * 1e12,
            exponentials=self.exponentials * 1e12,
            memory=self.memory_rate * 1e9,
            fill=constants.fill,
            wave=self.multiprocessors * self.tiles[0],
            wave_backward=self.multiprocessors * self.tiles[1],
            head_dims=HEAD_DIMS,
            call=constants.call,
            latency=constants.latency,
            crowding=self.crowding,
            slowdown=constants.slowdown,
        )


HEAD_DIMS = (32, 64, 96, 128, 192, 256)
"""Head dims of flash-attention's kernels (Dao-AILab/flash-attention, csrc/flash_attn/src/static_switch.h)."""

_A100 = Machine(
    name="A100-NVLink",
    tflops=312,
    multiprocessors=108,
    exponentials=2.4,
    memory_rate=2039,
    memory=80e9,
    capability=8,
    link=300,
    nic=25,
    forward=0.86,
    backward=0.65,
)
_H100 = Machine(
    name="H100",
    tflops=989,
    multiprocessors=132,
    tiles=(128, 128),
    exponentials=3.9,
    memory_rate=3350,
    memory=80e9,
    capability=9,
    link=450,
    nic=50,
    forward=0.93,
    backward=0.67,
)
_B200 = replace(
    _H100, name="B200", tflops=2250, multiprocessors=148, tiles=(256, 128), memory_rate=8000, memory=180e9,
    exponentials=8.8,  # twice 16 a clock: kernels make some by polynomials; an assumption
    capability=10, link=900, forward=0.79, backward=0.41,
)  # fmt: skip
_PCIE = replace(_A100, link=32, switched=False)
_L20 = replace(
    _PCIE, name="L20-PCIe", tflops=119.5, multiprocessors=92, exponentials=3.7, memory_rate=864, memory=48e9,
    reached=0.27, crowding=1.3,
)  # fmt: skip
_ALL = (
    _A100,
    replace(_A100, name="A800", link=200),
    replace(_A100, name="A100-quad", node=4, nic=2.2),
    replace(_PCIE, name="A100-PCIe", memory_rate=1935, node=4, reached=0.083, crowding=0.176),
    _H100,
    replace(_H100, name="H200", memory_rate=4800, memory=141e9),
    _B200,
    _L20,
    # No row of these was published: kernels and PCIe are a related GPU's. Data sheets: GB200 NVL72, HGX B300.
    replace(_B200, name="GB200", tflops=2500, memory=186e9, node=72),
    # Exponentials: developer.nvidia.com/blog, "Inside NVIDIA Blackwell Ultra".
    replace(_B200, name="B300", exponentials=10.7, memory=288e9, nic=100),
    # No data sheet of the H20 is public: as sellers print them.
    replace(_H100, name="H20", tflops=148, multiprocessors=78, exponentials=2.3, memory_rate=4000,
            memory=96e9),
    replace(_L20, name="L40S", tflops=362, multiprocessors=142, exponentials=5.7),  # data sheet
    # Ada white paper, appendix A: products that are added in float32.
    replace(_L20, name="RTX4090", tflops=165.2, multiprocessors=128, exponentials=5.2, memory_rate=1008,
            memory=24e9),
    # AMD's data sheet: 7 links of 64 GB/s. Kernels are taken to be as good as an A100's.
    replace(_A100, name="MI300X", tflops=1307, multiprocessors=304, exponentials=10.2, memory_rate=5300,
            memory=192e9, link=448, nic=50),
)  # fmt: skip
MACHINES = {machine.name: machine for machine in _ALL}
"""Specifications are from NVIDIA's data sheets; network cards are from its DGX systems.

Tiles are those of flash-attention. In csrc/flash_attn/src they are two blocks of 128 queries
(flash_fwd_launch_template.h) and one of 128 keys (flash_bwd_launch_template.h). In hopper they are one of 128
(tile_size.h, flash_bwd_launch_template.h). The tiles of a B200 are an assumption.

Machines without published rows take the kernel shares of a related GPU. The A800, the A100 on PCIe and the
L20 take the shares of the A100, the H200 of the H100. No preset has `Rates.levels`: no specification names
the hosts of the PCIe machines in public rows. Slower links between pairs or halves explain these rows
hardly better: the mean error of the L20 falls from 12 % to 11 %, of the A100 not at all. A100-quad
is the cluster of DeepSpeed's figures of Ulysses-Offload, 4 GPUs a node. Its network is not published: `nic`
is fitted to one of those figures, of 32K tokens of Llama3-70B by Ulysses.
"""


def machine(word: str) -> Machine:
    """Return the machine of a name in `MACHINES`, in any spelling; "a100" is the A100 with NVLink.

    Raises:
        ValueError: an unknown name.
    """
    for name, preset in MACHINES.items():
        if _plain(word) in (_plain(name), _plain(name.split("-")[0])):
            return preset
    raise ValueError(f"unknown machine {word!r}: one of {', '.join(MACHINES)}")


def _plain(name: str) -> str:
    return re.sub("[-_ ]|rtx", "", name.lower())


def machine_of(gpu: str) -> str | None:
    """Return the name in `MACHINES` of a GPU, from the name that CUDA gives it; None if it is unknown."""
    words = gpu.lower().replace("-", " ").split()
    pcie = any("pcie" in word for word in words)
    for name in MACHINES:
        if _plain(name.split("-")[0]) in words:
            return "A100-PCIe" if pcie and name.startswith("A100") else name
    return None
