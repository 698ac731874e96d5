# Two commands are all that most people need: `make demo` and `make test`. Both want Debian 12 with
# Rust, Go 1.26 and root, and bring everything else.

export PATH := $(PATH):$(HOME)/.cargo/bin:/usr/local/go/bin
# What cargo builds is kept outside the checkout: a fresh clone finds its dependencies built.
export CARGO_TARGET_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/highwater/target
OWN := $(shell CARGO_TARGET_DIR=$(CARGO_TARGET_DIR) hack/own-target)

CLUSTER := cargo run --quiet --package highwater-e2e --bin cluster --
# Which of the machine's clusters is meant: HIGHWATER_E2E_CLUSTER, 0 where it is not set, up to 7.
# Arguments of `cluster up`, for instance: make up UP='--nodes 2 --gpus 4'
UP ?=
ARGS ?=

.PHONY: help demo test e2e kills fleet up down images install uninstall status kubectl check generate \
	sanitize bench-agent bench-decide bench-guard bench-leaks bench-plan bench-pool bench-reaction bench-simulate fuzz

help: ## Show the targets; those of a cluster are about HIGHWATER_E2E_CLUSTER (0 to 7)
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: up install ## Bring up a cluster and watch a pod over its quota being restarted
	cargo run --quiet --package highwater-scenarios --bin demo

test: ## Everything: format, lints, unit tests, generated files, scenarios on clusters of their own
	@hack/test

up: ## Bring up the test cluster, or bring it up to date
	$(CLUSTER) up $(UP)

down: ## Take the test cluster down
	$(CLUSTER) down

images: ## Rebuild the product and import the images that changed
	$(CLUSTER) images

install: ## Install or upgrade the product on the test cluster by its charts
	$(CLUSTER) install

uninstall: ## Uninstall the product
	$(CLUSTER) uninstall

status: ## Show the cluster's components
	$(CLUSTER) status

kubectl: ## kubectl on the test cluster: make kubectl ARGS='get gmp,gmn'
	@$(CLUSTER) kubectl -- $(ARGS)

e2e: up install ## The scenarios alone, on the cluster that is up
	cargo test --package highwater-e2e --test '*' -- --ignored --test-threads=1
	cargo test --package highwater-scenarios --test '*' -- --test-threads=1 $(ARGS)

kills: up install ## The operator killed after every write of a restart and of a drain: make kills UP='--nodes 2'
	HIGHWATER_E2E_KILLS=all cargo test --package highwater-scenarios --test scenarios -- --test-threads=1 --nocapture \
		kills::whichever_write

fleet: ## Scenarios on a fleet of 1,000 simulated nodes, on the cluster that is up: FLEET_NODES=100 make fleet
	cargo test --package highwater-scenarios --test scenarios -- --test-threads=1 --ignored fleet::

check: ## What a change must pass before anything else: format, lints, generated files
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	cargo xtask check

generate: ## Write the files that are generated from the code
	cargo xtask generate

bench-reaction: ## Measure from the sample to the eviction request, on a cluster with release binaries
	$(CLUSTER) up --profile release --gpus 6 --gpu-replicas 1 $(UP)
	$(CLUSTER) install
	cargo run --quiet --package highwater-scenarios --bin bench-reaction -- $(ARGS)

bench-plan: ## Measure the plans of a fleet of 5,000 nodes
	cargo bench --quiet --package highwater-operator --bench plan

bench-decide: ## Measure a plan of acts over 10,000 devices, and redirection among 5,000 nodes
	cargo bench --quiet --package highwater-policy --bench decide

bench-agent: ## Measure the agent: what it costs, how fast it acts, how large it is
	cargo bench --quiet --profile dev --package highwater-agent --bench agent

bench-guard: ## Measure what the guard adds to programs; with a GPU: make bench-guard ARGS=--real
	bench=$$(guard/bench/build.sh) && "$$bench/guard-bench" $(ARGS)

bench-pool: ## Measure what fragmentation takes of a pool (with a GPU: e2e/real-gpu/pool_bench.py)
	cargo run --quiet --release --package highwater-guard-bench --bin pool-bench

bench-leaks: ## Measure how early leaks are found and what else is taken for one: ARGS='--side even --quick', --write
	cargo run --quiet --release --package highwater-leak-bench -- $(ARGS)

bench-simulate: ## Measure how fast recorded series are replayed, and what that holds
	cargo bench --quiet --package highwater-cli --bench simulate

sanitize: ## Run the tests of what has unsafe code, and can, under the address sanitizer
	RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=0 cargo test --quiet \
		--target x86_64-unknown-linux-gnu --package highwater-guard-abi --package highwater-gpu

# So many inputs for each target, or so many seconds.
FUZZ_INPUTS ?= 10000000
FUZZ_SECONDS ?= 600

fuzz: ## Feed what others write with garbage: the guard's messages and pages, requests for volumes
	cargo run --quiet --release --package highwater-guard-abi --features fuzz --example fuzz -- \
		--inputs $(FUZZ_INPUTS) --seconds $(FUZZ_SECONDS)
	cargo test --quiet --release --package highwater-agent --bin keeper --no-run
	PROPTEST_CASES=$(FUZZ_INPUTS) timeout $(FUZZ_SECONDS) cargo test --quiet --release --package highwater-agent \
		--bin keeper any_request || [ $$? -eq 124 ]
