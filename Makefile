# One command each, set-up included. `make PYTHON=python3.12 demo` names another Python for a new .venv.
PYTHON ?= python3
ARGS ?=

# DeepSpeed and torch look for ninja on PATH when they compile a kernel.
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH"
# A user's own files beside these folders, and a conftest.py, pytest.ini or ruff.toml among them, change nothing.
CODE := actors docker jobs t2g tests
RUFF := $(RUN) ruff check --config pyproject.toml $(CODE) && $(RUN) ruff format --check --config pyproject.toml $(CODE)
LIGHT := $(RUFF) && $(RUN) lint-imports && $(RUN) pyrefly check -c pyproject.toml --progress-bar no
INSTALL := .venv/bin/uv pip install --quiet --python .venv/bin/python --require-hashes --requirement
PYTEST := $(RUN) python -m pytest -c pyproject.toml --confcutdir=tests
# One process a file, so that the fixtures of a module run once. The longest files first: so all end together.
UNIT := $(PYTEST) tests --ignore=tests/integration --ignore=tests/hosts -n 3 --dist loadfile
REAL := $(PYTEST) tests/integration -n 2 --no-loadscope-reorder

# Some images forbid it, and every process of a run, of which the tests start hundreds, would compile this code again.
export PYTHONDONTWRITEBYTECODE :=

# Nothing here reports to anybody, and without a network nothing waits for an answer.
export DO_NOT_TRACK := 1
export VLLM_NO_USAGE_STATS := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help setup gpu demo real real-lines real-proof real-reward test test-all lint docs docs-site

help:
	@echo "make demo      the whole pipeline on the tiny world, three methods, a table and a report (ARGS=\"key=value ...\")"
	@echo "make real      a real instruct model of 135 M on real texts: critiques, SFT, PPO from a feedback function, a table"
	@echo "make real-lines   span against scalar on that model, on long and short answers; makes the runs that the results lack"
	@echo "make real-proof   spans against one number where the model's faults follow rules; 20 hours, goes on where it stopped"
	@echo "make real-reward  a span reward model of 135 M from a program's critiques, and PPO from it"
	@echo "make test      lint, unit tests, then the real stack: Ray, vLLM, DeepSpeed ZeRO-3"
	@echo "make test-all  the same with the slow suites"
	@echo "make lint      ruff, formatting, the import contracts and types"
	@echo "make docs      configs/README.md and t2g/guides/metrics.md again, from the schemas and the registry"
	@echo "make docs-site all documents as a site with search, in build/site"
	@echo "make setup     only the CPU set, in .venv"
	@echo "make gpu       the GPU set, in .venv"

setup:
	@$(PYTHON) docker/install.py cpu

gpu:
	@$(PYTHON) docker/install.py gpu

demo: setup
	@$(RUN) python -m jobs.demo --config configs/tiny/demo.yaml $(ARGS)

# A CPU without instructions for bfloat16 multiplies it at a sixth of the speed of float32. Not for `jobs.compare`, whose
# finished runs are bfloat16.
DTYPE := $(shell grep -qsE "avx512_bf16|amx_bf16" /proc/cpuinfo && echo bfloat16 || echo float32)
ROLLOUT := rollout.dtype=$(DTYPE)
ANNOTATE := $(ROLLOUT) annotate.engine.dtype=$(DTYPE)

# Each resumes, and what is finished is kept.
real: setup
	@$(RUN) python docker/real.py
	@$(RUN) python -m jobs.annotate --config configs/smol/annotate.yaml $(ANNOTATE) run.name=critiques_once annotate.llm.max_tries=1
	@$(RUN) python -m jobs.annotate --config configs/smol/annotate.yaml $(ANNOTATE)
	@$(RUN) python -m jobs.train_sft --config configs/smol/sft.yaml sft.dtype=$(DTYPE)
	@$(RUN) python -m jobs.train_policy --config configs/smol/policy.yaml $(ROLLOUT) learner.dtype=$(DTYPE)
	@$(RUN) python -m jobs.evaluate --what policy --config configs/smol/evaluate_policy.yaml $(ROLLOUT)
	@$(RUN) python -m jobs.evaluate --what policy --config configs/smol/evaluate_temperatures.yaml $(ROLLOUT)

real-lines: setup
	@$(RUN) python docker/real.py
	@$(RUN) python -m jobs.train_sft --config configs/smol_lines/sft.yaml sft.dtype=$(DTYPE)
	@$(RUN) python -m jobs.compare --config configs/smol_lines/compare.yaml $(ARGS)
	@$(RUN) python -m jobs.compare --config configs/smol/compare.yaml $(ARGS)

# Always in bfloat16, as the finished runs are.
real-proof: setup
	@$(RUN) python docker/real.py
	@$(RUN) python -m jobs.train_sft --config configs/smol_checked/sft.yaml
	@$(RUN) python -m jobs.evaluate --what policy --config configs/smol_checked/evaluate_temperatures.yaml
	@$(RUN) python -m jobs.compare --config configs/smol_checked/compare.yaml $(ARGS)

# Records of the policies of `make real`: first those to learn from, at last those of the policy that PPO has trained.
JUDGE = $(RUN) python -m jobs.annotate --config configs/smol_reward/annotate.yaml $(ROLLOUT)
real-reward: real
	@$(JUDGE)
	@$(JUDGE) run.name=judged_sft model.policy=runs/smol/sft/model
	@$(RUN) python -m jobs.train_reward --config configs/smol_reward/reward.yaml sft.dtype=$(DTYPE) engine.dtype=$(DTYPE)
	@$(RUN) python -m jobs.train_policy --config configs/smol_reward/policy.yaml $(ROLLOUT) learner.dtype=$(DTYPE) feedback.engine.dtype=$(DTYPE)
	@$(JUDGE) run.name=judged_ppo model.policy=runs/smol/ppo_reward/policy
	@$(RUN) python -m jobs.evaluate --what reward --config configs/smol_reward/evaluate.yaml feedback.engine.dtype=$(DTYPE) run.name=reward_heldout \
		data.path='[runs/smol/judged_base/heldout.jsonl,runs/smol/judged_sft/heldout.jsonl]'
	@$(RUN) python -m jobs.evaluate --what reward --config configs/smol_reward/evaluate.yaml feedback.engine.dtype=$(DTYPE)
	@$(RUN) python -m jobs.evaluate --what policy --config configs/smol_reward/evaluate_policy.yaml $(ROLLOUT)

lint: setup
	@$(LIGHT)

docs: setup
	@$(RUN) PYTHONPATH=. python tests/make_config_reference.py
	@$(RUN) PYTHONPATH=. python tests/make_metrics_reference.py

docs-site: setup
	@$(INSTALL) docker/constraints-docs.txt
	@$(RUN) NO_MKDOCS_2_WARNING=1 python docker/docs_site.py build/site

test: setup
	@$(LIGHT)
	@$(UNIT) -m "not slow" $(ARGS)
	@$(REAL) -m "not slow" $(ARGS)

test-all: test
	@$(INSTALL) docker/constraints-notebook.txt
	@$(UNIT) -m slow $(ARGS)
	@$(PYTEST) tests/integration -m slow $(ARGS)
	@$(PYTEST) tests/hosts -m slow $(ARGS)
