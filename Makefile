# make up      everything, from a fresh checkout to a served model
# make test    everything that CI runs
.DEFAULT_GOAL := help
SHELL := /bin/bash
TRACES ?= 0
ARGS ?=

.PHONY: help up test check setup router-env engine-env quantizer-env checkpoints clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

up: ## set up what is missing, start three engines and the router (TRACES=1: a trace viewer too; ARGS: for qarr up)
	@scripts/up "$(TRACES)" $(ARGS)

test: ## lint, types, unit tests, and tests on real engines
	@scripts/test

check: ## lint and types only
	@scripts/check

setup: ## make all three environments and the checkpoints, start nothing
	@scripts/setup router engine quantizer
	@.venv/bin/qarr model prepare

router-env: ## .venv: the router and the command
	@scripts/setup router

engine-env: ## .venv-engine: vLLM
	@scripts/setup engine

quantizer-env: ## .venv-quantizer: llm-compressor
	@scripts/setup quantizer

checkpoints: ## the model's three checkpoints
	@scripts/setup router quantizer
	@.venv/bin/qarr model prepare

clean: ## remove the environments' links and .venv; what is cached stays
	rm -rf .venv .venv-engine .venv-quantizer .venv-ray
