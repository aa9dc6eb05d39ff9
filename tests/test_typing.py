"""What a type checker says of users' code: see `py.typed`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import zinf_fx

USERS_CODE = """
import torch
import zinf_fx
from zinf_fx import offload
from zinf_fx.config import Options

model = torch.nn.Linear(2, 2)
offload(model, placement="nvme")
offload(model, placment="nvme")  # flagged
offload(model, micro_batches="many")  # flagged
options: Options = {"placement": "infinity-nvme", "micro_batches": 8}
offload(model, **options)
options = {"placment": "infinity-nvme"}  # flagged
torch.compile(model, backend="zinf", options={"placement": "infinity-nvme", "micro_batches": 8})(torch.zeros(1, 2))
zinf_fx.Config(device_memory="4GiB")
zinf_fx.Config(device_memry="4GiB")  # flagged
zinf_fx.offload(model, placement="nvme", device_memory="4GiB")
zinf_fx.offload(model, placment="nvme")  # flagged
zinf_fx.offload(model, placement="disk")  # flagged
with zinf_fx.offloading(placement={"parameters": [("*lora*", "device"), ("*", "nvme")], "optimizer": "host"}):
    pass
with zinf_fx.offloading(stage=3):  # flagged
    pass
zinf_fx.explain(model, torch.zeros(1, 2), placement="nvme", state_dtype="8bit").splitlines()
zinf_fx.explain(model, torch.zeros(1, 2), state_dtpe="8bit")  # flagged
optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-3, state_dtype="8bit", master_dtype="split", overlap=False)
zinf_fx.optim.AdamW(model.parameters(), state_dtpe="8bit")  # flagged
zinf_fx.optim.AdamW(model.parameters(), state_dtype="4bit")  # flagged
zinf_fx.optim.AdamW(model.parameters(), master_dtpye="split")  # flagged
zinf_fx.optim.AdamW(model.parameters(), master_dtype="8bit")  # flagged
loss: float = zinf_fx.optim.AdamW(model.parameters()).step(lambda: 1.0)
loss = zinf_fx.optim.AdamW(model.parameters()).step()  # flagged
with zinf_fx.gathered(model.weight, modify=True) as weight:
    pass
with zinf_fx.gathered(model.weight, modfy=True) as weight:  # flagged
    pass
zinf_fx.optim.SGD(model.parameters(), 0.1, momentum=0.9, step_in_backward=True).step()
zinf_fx.optim.SGD(model.parameters(), 0.1, momentun=0.9)  # flagged
optimizer.state[model.weight]["exp_avg"]
zinf_fx.save_checkpoint("folder", model, optimizer)
"""


@pytest.mark.skipif(importlib.util.find_spec("basedpyright") is None, reason="needs basedpyright")
def test_misspelled_options_are_found_in_users_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(USERS_CODE)
    package = Path(zinf_fx.__file__).parent
    assert (package / "py.typed").is_file()
    settings = {"include": ["train.py"], "extraPaths": [str(package.parent)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    checker = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    checked = subprocess.run(checker, cwd=tmp_path, capture_output=True, text=True)
    problems = json.loads(checked.stdout)["generalDiagnostics"]
    flagged = {problem["range"]["start"]["line"]: problem["message"] for problem in problems}
    assert sorted(flagged) == [n for n, line in enumerate(USERS_CODE.splitlines()) if line.endswith("# flagged")], (
        flagged
    )
