//! A simulated driver for the tests of one file: its libraries, and its daemon, served by a thread
//! of the test's process.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use gpusim::{config::Config, daemon::Daemon, protocol::SOCKET_VARIABLE};

/// Where the simulated driver is.
pub(crate) struct Host {
    /// The folder of its libraries.
    pub(crate) libraries: PathBuf,
    /// The daemon's socket.
    pub(crate) socket: PathBuf,
}

impl Host {
    /// Starts a daemon with this configuration and builds the libraries of these packages. To be called
    /// once a process, before any other thread of it reads the environment.
    pub(crate) fn start(config: &str, packages: &[&str]) -> Self {
        // A process that ends by itself leaves its directory to the system's clean-up.
        let socket = tempfile::tempdir().unwrap().keep().join("gpu.sock");
        let daemon = Daemon::bind(&socket, Config::from_json(config).unwrap()).unwrap();
        thread::spawn(|| daemon.serve().unwrap());
        // SAFETY: every test begins with this initialisation, so no other thread of the process
        // reads the environment meanwhile.
        unsafe { env::set_var(SOCKET_VARIABLE, &socket) };
        Self { libraries: build(packages), socket }
    }

    /// The simulated management library.
    pub(crate) fn nvml(&self) -> PathBuf {
        self.libraries.join("libgpusim_nvml.so")
    }
}

/// Builds the simulated libraries with the profile of this test.
fn build(packages: &[&str]) -> PathBuf {
    let profile_dir = env::current_exe().unwrap().ancestors().nth(2).map(Path::to_owned).unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--manifest-path"]);
    build.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"));
    build.arg("--target-dir").arg(profile_dir.parent().unwrap());
    build.args(packages.iter().flat_map(|package| ["--package", package]));
    if profile_dir.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "the simulated libraries do not build");
    profile_dir
}
