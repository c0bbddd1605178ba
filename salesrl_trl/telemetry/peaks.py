"""The peaks of chips. Owns the table with its sources, which `instruments` asks. Reads no device."""

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """The peak of a chip: dense bf16 matrix products with sums in fp32."""

    name: str
    """Regular expression for the whole of `torch.cuda.get_device_name()`, without a leading "NVIDIA "."""
    flops: float
    """FLOP/s. Half of the source's figure where the source only gives it with 2:4 sparsity."""
    source: str


HGX_BLACKWELL = "NVIDIA HGX data sheet, FP16/BF16 of 8 GPUs with sparsity"
PEAK_BF16_FLOPS = (
    Peak(r"GB300", 2500e12, "NVIDIA GB300 NVL72 data sheet: 360 PFLOPS of 72 GPUs with sparsity"),
    Peak(r"B300( SXM6 AC)?", 2250e12, f"{HGX_BLACKWELL}: B300 36 PFLOPS"),
    Peak(r"GB200", 2500e12, "NVIDIA GB200 NVL72 data sheet: 360 PFLOPS of 72 GPUs with sparsity"),
    Peak(r"B200", 2250e12, f"{HGX_BLACKWELL}: B200 36 PFLOPS"),
    Peak(r"B100", 1750e12, f"{HGX_BLACKWELL}: B100 28 PFLOPS"),
    Peak(r"GH200 (120GB|480GB|144G HBM3e)", 989.4e12, "NVIDIA GH200 data sheet: 1,979 with sparsity, as the H100 SXM"),
    Peak(r"H200", 989.4e12, "NVIDIA H200 data sheet: SXM 1,979 with sparsity, the chip of the H100 SXM"),
    Peak(r"H200 NVL", 835.5e12, "NVIDIA H200 data sheet: NVL 1,671 with sparsity"),
    Peak(r"H100 \d+GB HBM3", 989.4e12, "NVIDIA H100 white paper, table of SXM5 and PCIe: 989.4 dense"),
    Peak(r"H100 PCIe", 756e12, "NVIDIA H100 white paper, table of SXM5 and PCIe: 756 dense"),
    Peak(r"H100 NVL", 835.5e12, "NVIDIA H100 data sheet: NVL 1,671 with sparsity"),
    # The chips of the H100, with less NVLink and fp64.
    Peak(r"H800", 989.4e12, "vendors' lists: 1,979 with sparsity, as the H100 SXM"),
    Peak(r"H800 PCIe", 756e12, "vendors' lists: 1,513 with sparsity, as the H100 PCIe"),
    Peak(r"H20(-3e)?", 148e12, "vendors' lists, for want of a data sheet on NVIDIA's site: 148 dense"),
    # Not the A100-SXM-64GB, which is another chip.
    Peak(r"A100[- ](SXM4-[48]0GB|PCI[Ee]-[48]0GB|80GB PCIe)", 312e12, "NVIDIA A100 white paper: 312 dense"),
    Peak(r"A800[- ](SXM4-[48]0GB|80GB PCIe)", 312e12, "the chip of the A100, with less NVLink"),
    Peak(r"A30", 165e12, "NVIDIA A30 data sheet: 165 dense"),
    Peak(r"A40", 149.7e12, "NVIDIA A40 data sheet: 149.7 dense"),
    Peak(r"A10", 125e12, "NVIDIA A10 data sheet: 125 dense"),
    Peak(r"A10G", 70e12, "NVIDIA A10G data sheet (the chip of AWS G5): 70 dense"),
    Peak(r"L4", 121e12, "NVIDIA L4 data sheet: 242 with sparsity"),
    Peak(r"L40", 181e12, "NVIDIA L40 data sheet: 181.05 dense"),
    Peak(r"L40S", 362e12, "NVIDIA L40S data sheet: 362.05 dense"),
    Peak(r"RTX A6000", 154.8e12, "NVIDIA RTX A6000 in the GA102 white paper: 154.8 dense"),
    Peak(r"RTX 6000 Ada Generation", 364.25e12, "data sheet: a quarter of its fp8, 1,457 with sparsity"),
    Peak(r"GeForce RTX 3090", 71e12, "NVIDIA GA102 white paper: bf16 with fp32 sums 71 dense"),
    Peak(r"GeForce RTX 4090", 165.2e12, "NVIDIA Ada white paper: bf16 with fp32 sums 165.2 dense"),
    Peak(r"AMD Instinct MI300X( OAM| VF)?", 1307.4e12, "AMD Instinct MI300X data sheet: 1,307.4 dense"),
    Peak(r"AMD Instinct MI325X( OAM| VF)?", 1307.4e12, "AMD Instinct MI325X data sheet: 1,307.4 dense"),
    Peak(r"AMD Instinct MI250X", 191.5e12, "AMD Instinct MI250X data sheet: 383 of two dies; a die is a device"),
)
"""Peaks with a source. A name must match as a whole: a slice of a GPU (MIG, vGPU), a laptop version and an export
version have another peak."""


def peak_bf16_flops(device_name: str) -> float | None:
    """Peak of a chip in FLOP/s with dense bf16; `None` for a chip that the table does not have.

    The name is that of `torch.cuda.get_device_name()`, for example "NVIDIA H100 80GB HBM3".
    """
    name = device_name.removeprefix("NVIDIA ")
    return next((peak.flops for peak in PEAK_BF16_FLOPS if re.fullmatch(peak.name, name)), None)
