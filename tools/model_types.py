"""Compare the tables of model types with the newest transformers and Megatron-Bridge of the registry.

`make matrix` runs it. It downloads both without installing them, reads which types they have, and writes into
docs/huggingface.md those that have no table: by which of the two they are known, and whether transformers has them under their
published names, so that they load and export without one. `python tools/model_types.py --wheels FOLDER` takes wheels that are there.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, TABLES = ROOT / "docs/huggingface.md", ROOT / "src/holdfast/_models/views/families"
BEGIN, END = "<!-- untabled -->\n", "<!-- end untabled -->"
LISTS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")


def download(folder: Path) -> None:
    """Download the newest wheels of both packages. Megatron-Bridge's is for Python 3.12."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--disable-pip-version-check",
        "-d",
        str(folder),
    ]
    for package in ("transformers", "megatron-bridge"):
        if subprocess.run([*pip, "--python-version", "3.12", "--only-binary", ":all:", package]).returncode:
            raise SystemExit(f"{package} can't be downloaded; give its wheel by --wheels.")


def tabled() -> set[str]:
    """Return the model types that have a table."""
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in TABLES.glob("*.toml")]
    return {kind for table in tables for kind in table.get("model_types", [])}


def of_transformers(wheel: zipfile.ZipFile) -> tuple[set[str], set[str]]:
    """Return the types of decoders, and those whose published tensors transformers renames or fuses."""
    auto = ast.parse(wheel.read("transformers/models/auto/modeling_auto.py"))
    types = {
        kind
        for node in auto.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if any(isinstance(target, ast.Name) and target.id in LISTS for target in node.targets)
        for kind, _ in ast.literal_eval(node.value.args[0])
    }
    conversions = ast.parse(wheel.read("transformers/conversion_mapping.py"))
    changed = {
        key.value
        for node in ast.walk(conversions)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    changed |= {
        node.slice.value
        for node in ast.walk(conversions)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    }
    return types, types & changed


def of_bridge(wheel: zipfile.ZipFile) -> set[str]:
    """Return the types that Megatron-Bridge has converters for, by the names that these register."""
    bridges = [name for name in wheel.namelist() if name.endswith("_bridge.py")]
    registered = (re.findall(r"model_type=\"(\w+)\"", wheel.read(name).decode()) for name in bridges)
    return {kind for kinds in registered for kind in kinds}


def version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def lines_of(wheels: Path) -> list[str]:
    """Return the lines of the page."""
    ours, paths = tabled(), {path.name.partition("-")[0]: path for path in sorted(wheels.glob("*.whl"))}
    with zipfile.ZipFile(paths["transformers"]) as wheel:
        types, changed = of_transformers(wheel)
    with zipfile.ZipFile(paths["megatron_bridge"]) as wheel:
        bridged = of_bridge(wheel)

    def listed(kinds: set[str]) -> str:
        return ", ".join(f"`{kind}`" for kind in sorted(kinds - ours)) or "none"

    return [
        f"By `tools/model_types.py`, {date.today():%-d %B %Y}: transformers {version(paths['transformers'])}, Megatron-Bridge "
        f"{version(paths['megatron_bridge'])}.",
        "",
        "| types without a table | |",
        "|---|---|",
        f"| transformers renames or fuses what is published | {listed(changed)} |",
        f"| Megatron-Bridge has a converter | {listed(bridged)} |",
        f"| published names are transformers' | {len(types - changed - ours)} types |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--wheels", type=Path, help="a folder with both wheels; otherwise they are downloaded"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        wheels = arguments.wheels or Path(scratch)
        if arguments.wheels is None:
            download(wheels)
        lines = lines_of(wheels)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1], encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
