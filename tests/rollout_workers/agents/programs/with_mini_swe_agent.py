"""Works a task out with mini-swe-agent as it is, and with the texts that it ships: the environment tells it of the
endpoint."""

import json
import os
from pathlib import Path

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

task = json.loads(Path(os.environ["HEADWAY_TASK"]).read_text())
shipped = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
texts = {name: shipped["agent"][name] for name in ("system_template", "instance_template")}
agent = DefaultAgent(LitellmModel(model_name="openai/policy"), LocalEnvironment(), step_limit=6, **texts)
outcome = agent.run(task["text"])
print(json.dumps({"reward": float(outcome["submission"].strip() == str(task["ground_truth"]))}))
