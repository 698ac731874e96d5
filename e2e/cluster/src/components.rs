//! Building the parts: the Go components into a cache by content, the product with cargo.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use sha2::{Digest as _, Sha256};

use crate::{
    command,
    paths::{Paths, replace},
};

/// A Go module below e2e/components.
struct Module {
    name: &'static str,
    package: &'static str,
    flags: &'static str,
    /// The names that its one binary is called by.
    programs: &'static [&'static str],
}

const MODULES: &[Module] = &[
    Module {
        name: "kubernetes",
        package: ".",
        // Without a version the API server says v0.0.0, and clients complain.
        flags: "-s -w -X k8s.io/component-base/version.gitVersion=v1.37.2 \
                -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37",
        programs: &[
            "etcd",
            "kube-apiserver",
            "kube-controller-manager",
            "kube-proxy",
            "kube-scheduler",
            "kubectl",
            "kubelet",
        ],
    },
    Module { name: "helm", package: "helm.sh/helm/v3/cmd/helm", flags: "-s -w", programs: &["helm"] },
    Module { name: "kwok", package: "sigs.k8s.io/kwok/cmd/kwok", flags: "-s -w", programs: &["kwok"] },
];

/// The guard, by the name that it has in pods.
pub(crate) const GUARD: &str = "libhighwater-guard.so";

/// What the readiness probes of pods run that opted in to `Unready`.
pub(crate) const READY: &str = "ready";

/// A product of this workspace that the cluster runs: package, file in the target folder, and the
/// name that it gets in the cluster.
const PRODUCTS: &[(&str, &str, &str)] = &[
    ("highwater-agent", "agent", "agent"),
    ("highwater-agent", "keeper", "keeper"),
    (GUARD_PACKAGE, "libhighwater_guard.so", GUARD),
    (READY_PACKAGE, "ready", READY),
    ("highwater-operator", "operator", "operator"),
    ("highwater-workloads", "workload", "workload"),
    ("gpu-device-plugin", "gpu-device-plugin", "gpu-device-plugin"),
    ("gpusim", "gpusim", "gpusim"),
    ("gpusim-cuda", "libgpusim_cuda.so", "libcuda.so.1"),
    ("gpusim-nvml", "libgpusim_nvml.so", "libnvidia-ml.so.1"),
];

/// What runs inside of other people's containers: the guard in their processes, and the helper of
/// their readiness probes. Where the product is not built for development, each is built as it is
/// shipped: by a profile of its own, without the standard library, in a build without other packages,
/// which would bring that in.
const GUARD_PACKAGE: &str = "highwater-guard";
const READY_PACKAGE: &str = "highwater-ready";
const GUARD_PROFILE: &str = "guard";
const GUARD_FEATURES: &str = "freestanding";

/// How the product is built.
#[derive(Args, Clone, Debug)]
pub struct Build {
    /// Cargo profile of the product's binaries: `release` where something is measured
    #[arg(long, default_value = "dev", env = "HIGHWATER_E2E_PROFILE")]
    pub profile: String,
    /// Take the binaries as they lie in the target folder; what is not there is left out
    #[arg(long)]
    pub no_build: bool,
}

impl Default for Build {
    fn default() -> Self {
        Self { profile: "dev".into(), no_build: false }
    }
}

impl Build {
    fn profile_of(&self, package: &str) -> &str {
        let alone = [GUARD_PACKAGE, READY_PACKAGE].contains(&package);
        if alone && self.profile != "dev" { GUARD_PROFILE } else { &self.profile }
    }
}

/// Builds the Go components that the cache lacks; the binary of each.
pub fn build_go(paths: &Paths) -> Result<Vec<PathBuf>> {
    MODULES.iter().map(|module| ensure_module(paths, module)).collect()
}

/// Gives each program of the Go components its name in the cluster's folder of binaries.
pub fn place_go(paths: &Paths, binaries: &[PathBuf]) -> Result<()> {
    fs::create_dir_all(paths.bin())?;
    for (module, binary) in MODULES.iter().zip(binaries) {
        for program in module.programs {
            let link = paths.program(program);
            if fs::read_link(&link).is_ok_and(|target| target == *binary) {
                continue;
            }
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink(binary, &link).with_context(|| format!("naming {program}"))?;
        }
    }
    Ok(())
}

fn ensure_module(paths: &Paths, module: &Module) -> Result<PathBuf> {
    let source = paths.repository.join("e2e/components").join(module.name);
    let key = key(&source, module.flags)?;
    let folder = paths.cache.join(format!("{}-{key}", module.name));
    let binary = folder.join(module.name);
    if binary.exists() {
        return Ok(binary);
    }
    tracing::info!("building {} (once; minutes where nothing of it is compiled yet)", module.name);
    fs::create_dir_all(&paths.cache)?;
    let building = tempfile::tempdir_in(&paths.cache)?;
    command::run(
        Command::new(go()?)
            .args(["build", "-trimpath", "-ldflags", module.flags, "-o"])
            .arg(building.path().join(module.name))
            .arg(module.package)
            .current_dir(&source)
            .env("CGO_ENABLED", "0"),
    )?;
    // Somebody else may have built the same meanwhile; theirs is as good.
    if let Err(error) = fs::rename(building.path(), &folder)
        && !binary.exists()
    {
        return Err(error).with_context(|| format!("filling the cache at {}", folder.display()));
    }
    forget_old(&paths.cache, module.name);
    Ok(binary)
}

/// Go from PATH, or from where its own archive is usually unpacked.
fn go() -> Result<&'static str> {
    ["go", "/usr/local/go/bin/go", "/usr/lib/go/bin/go"]
        .into_iter()
        .find(|go| Command::new(go).arg("version").output().is_ok_and(|output| output.status.success()))
        .context("Go is missing: install Go 1.26 (https://go.dev/dl) and put it on the PATH")
}

/// Everything that decides what a module builds to.
fn key(source: &Path, flags: &str) -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(flags);
    for file in ["go.mod", "go.sum", "main.go"] {
        hash.update([0]);
        match fs::read(source.join(file)) {
            Ok(content) => hash.update(content),
            // Modules that only name a tool have no main.go.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && file == "main.go" => {}
            Err(error) => {
                return Err(error).with_context(|| format!("reading {file} in {}", source.display()));
            }
        }
    }
    Ok(hex(&hash.finalize(), 16))
}

/// Keeps the newest three builds of a module: other checkouts may use them.
fn forget_old(cache: &Path, module: &str) {
    let Ok(entries) = fs::read_dir(cache) else { return };
    let mut builds: Vec<(SystemTime, PathBuf)> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&format!("{module}-")))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    builds.sort();
    builds.reverse();
    for (_, old) in builds.into_iter().skip(3) {
        let _ = fs::remove_dir_all(old);
    }
}

/// Builds the product.
pub fn build_products(paths: &Paths, build: &Build) -> Result<()> {
    if build.no_build {
        return Ok(());
    }
    tracing::info!("building the product ({})", build.profile);
    let packages: BTreeSet<&str> = PRODUCTS.iter().map(|(package, _, _)| *package).collect();
    let (alone, together): (Vec<&str>, Vec<&str>) =
        packages.into_iter().partition(|package| build.profile_of(package) == GUARD_PROFILE);
    let builds = std::iter::once(together).chain(alone.into_iter().map(|package| vec![package]));
    for packages in builds {
        let profile = packages.first().map_or(build.profile.as_str(), |package| build.profile_of(package));
        let mut cargo = Command::new("cargo");
        cargo.args(["build", "--quiet", "--profile", profile]).current_dir(&paths.repository);
        cargo.args(packages.iter().flat_map(|package| ["--package", package]));
        if profile == GUARD_PROFILE {
            cargo.args(["--features", GUARD_FEATURES]);
        }
        command::run(&mut cargo).context("building the product (--no-build takes what is there)")?;
    }
    Ok(())
}

/// Copies the product to the cluster's folder of binaries, as far as it has changed.
pub fn place_products(paths: &Paths, build: &Build) -> Result<()> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| paths.repository.join("target"), PathBuf::from);
    for (package, file, name) in PRODUCTS {
        let profile = build.profile_of(package);
        let artifact = target.join(if profile == "dev" { "debug" } else { profile }).join(file);
        if !artifact.exists() {
            if build.no_build {
                tracing::warn!("{package} is not built: going on without {name}");
                continue;
            }
            bail!("{package} builds no {}", artifact.display());
        }
        place(&artifact, &paths.program(name))?;
    }
    Ok(())
}

/// Copies a file to where the cluster looks for it, unless the same is there.
pub(crate) fn place(source: &Path, target: &Path) -> Result<()> {
    let content = fs::read(source).with_context(|| format!("reading {}", source.display()))?;
    if fs::read(target).is_ok_and(|placed| placed == content) {
        return Ok(());
    }
    replace(source, target)
}

/// The first `digits` hexadecimal digits of a hash.
pub(crate) fn hex(bytes: &[u8], digits: usize) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text.truncate(digits);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_follows_sources_and_flags() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("go.mod"), "module a").unwrap();
        fs::write(dir.path().join("go.sum"), "").unwrap();
        let first = key(dir.path(), "-s").unwrap();
        assert_eq!(first.len(), 16);
        assert_eq!(first, key(dir.path(), "-s").unwrap());
        assert_ne!(first, key(dir.path(), "-w").unwrap());
        fs::write(dir.path().join("main.go"), "package main").unwrap();
        assert_ne!(first, key(dir.path(), "-s").unwrap());
    }

    #[test]
    fn the_guard_has_its_own_profile_beside_a_measured_product() {
        let build = |profile: &str| Build { profile: profile.into(), no_build: false };
        assert_eq!(build("release").profile_of(GUARD_PACKAGE), "guard");
        assert_eq!(build("release").profile_of("highwater-agent"), "release");
        assert_eq!(build("release").profile_of(READY_PACKAGE), "guard");
        assert_eq!(build("dev").profile_of(GUARD_PACKAGE), "dev");
    }

    #[test]
    fn a_module_without_sums_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("go.mod"), "module a").unwrap();
        assert!(key(dir.path(), "").unwrap_err().to_string().contains("go.sum"));
    }
}
