# The project's commands. Each does its own set-up (see .ci/setup).

CARGO ?= cargo
# Passed to every cargo command; CI sets --locked.
CARGOFLAGS ?=
# A debug build is optimised as well (see Cargo.toml), so tests need no --release.
CLI = $(CARGO) run $(CARGOFLAGS) --release -p vmm-dedup-cli --

# Where rustup puts cargo, for shells that were not told yet.
export PATH := $(PATH):$(HOME)/.cargo/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint audit package deb check-deb bench overhead chaos soak worst hostile fuzz nested screens

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)$$/make \1\t\2/' | expand -t 16

setup: ## find, and where possible install, what the other commands need
	@.ci/setup

demo: setup ## four guests that share memory, watched live and verified at the end
	$(CLI) demo

test: setup ## all tests
	.ci/test $(CARGO) $(CARGOFLAGS)

# The crates that are for others: see `publish` in Cargo.toml.
PUBLISHED = $(addprefix -p vmm-dedup,-protocol -agent-wire -agent-receiver -packed) -p vmm-dedup -p vmm-dedup-hints

# The engine with each of its features alone, and the crates that are for others as they would be published.
lint: setup ## formatting, clippy and rustdoc, all warnings being errors
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy $(CARGOFLAGS) --workspace --all-targets -- -D warnings
	for feature in "" agent forks pack privileged settings seccomp; do \
		$(CARGO) clippy $(CARGOFLAGS) --quiet -p vmm-dedup --lib --no-default-features --features "$$feature" -- -D warnings || exit; \
	done
	$(CARGO) package $(CARGOFLAGS) --quiet --no-verify --allow-dirty $(PUBLISHED)
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(CARGOFLAGS) --workspace --no-deps --document-private-items

# Its database of advisories comes from the network, which CI does not rely on. Licences are checked by the tests.
audit: ## dependencies with known vulnerabilities (cargo-audit, network)
	@if $(CARGO) audit --version >/dev/null 2>&1; then $(CARGO) audit; \
	else echo "SKIPPED: cargo-audit is missing: cargo install cargo-audit --locked"; fi

# As `lint` packs them, but each is also built from nothing but its package.
package: setup ## the crates that are for others, as they would be published, each built from its package
	$(CARGO) package $(CARGOFLAGS) --allow-dirty $(PUBLISHED)

deb: setup ## Debian packages of command line and store, preload library and guest agent, in target/debian
	vmm-dedup/packaging/build-debs target/debian

# The tests do so with what they have built.
check-deb: setup ## the packages installed, used, upgraded and removed in a minimal Debian, and its systemd starts the units (root, KVM, mmdebstrap)
	vmm-dedup/packaging/check-deb
	vmm-dedup/packaging/check-systemd

bench: setup ## the same content merged by KSM and by us, in turn (root; some minutes)
	$(CLI) bench ksm $(BENCHFLAGS)

overhead: setup ## what the preload library costs a VM that it does not deduplicate (cloud-hypervisor)
	$(CARGO) run $(CARGOFLAGS) --release -p vmm-dedup-integration-tests --bin overhead -- $(OVERHEADFLAGS)

nested: setup ## real Linux guests in a Linux host in QEMU; logs go to target/nested-out
	$(CARGO) build $(CARGOFLAGS) -p vmm-dedup-cli -p vmm-dedup-preload -p vmm-dedup-nested
	$(CARGO) run $(CARGOFLAGS) -p vmm-dedup-nested -- run --out target/nested-out

screens: setup ## what the dashboards show of a real fleet, drawn into docs/dashboards (KVM, Prometheus; three minutes)
	$(CARGO) run $(CARGOFLAGS) -p vmm-dedup-integration-tests --bin screens -- docs/dashboards

worst: setup ## 64 hostile connections do their worst for a minute, and what an honest VM notices
	VMM_DEDUP_WORST_SECONDS=60 $(CARGO) test $(CARGOFLAGS) --release -p vmm-dedup-store --test worst -- --nocapture --test-threads=1

hostile: setup ## a guest's agent attacks its service, and comes and goes a million times (KVM; some minutes)
	VMM_DEDUP_HOSTILE_RECONNECTS=1000000 $(CARGO) test $(CARGOFLAGS) --release -p vmm-dedup-integration-tests --test hostile_agent -- --nocapture --test-threads=1

fuzz: setup ## 10^8 fuzzed messages to a store, and as many through the parser (half an hour and more)
	VMM_DEDUP_FUZZ_INPUTS=100000000 $(CARGO) test $(CARGOFLAGS) --release -p vmm-dedup-fuzz-bodies --test seconds -- messages_are --nocapture
	VMM_DEDUP_FUZZ_MESSAGES=100000000 $(CARGO) test $(CARGOFLAGS) --release -p vmm-dedup-store --test fuzz -- --nocapture --test-threads=1

soak: setup ## a fleet that churns for four hours, or as long as SOAKFLAGS says: it must neither decay nor grow
	$(CARGO) run $(CARGOFLAGS) --release -p vmm-dedup-integration-tests --bin soak -- $(SOAKFLAGS)

chaos: setup ## the long run: 2,000,000 merges, 1,000,000 under swap, 1,000,000 splits and rebuilds, 4,000,000 heals, 400,000 direct reads
	$(CARGO) run $(CARGOFLAGS) --release -p vmm-dedup-integration-tests --bin chaos -- --long
