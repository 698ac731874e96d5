//! A device plugin that hands out GPUs under `nvidia.com/gpu`, whole or shared: simulated ones, or
//! the real ones of the node it runs on.

mod access;
mod allocation;
mod devices;
mod kubelet;
mod plugin;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use kubelet_api::deviceplugin::DEFAULT_DIRECTORY;

use crate::access::{Access, find_library};
use crate::plugin::Plugin;

/// Hands GPUs out to pods.
#[derive(Debug, Parser)]
#[command(name = "gpu-device-plugin", version)]
struct Arguments {
    /// Simulated devices, or the node's own.
    #[arg(long, value_enum, default_value = "sim")]
    mode: Mode,
    /// How many pods may share a device.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    replicas: u32,
    /// Name of the extended resource.
    #[arg(long, default_value = "nvidia.com/gpu")]
    resource: String,
    /// Directory of the simulated libraries.
    #[arg(long, default_value = "/opt/gpusim/lib")]
    library_dir: PathBuf,
    /// Directory of the simulated driver's socket.
    #[arg(long, default_value = "/run/gpusim")]
    gpusim_dir: PathBuf,
    /// Where the real driver is installed, if not in the node's own root.
    #[arg(long, default_value = "/")]
    driver_root: PathBuf,
    /// The libnvidia-ml.so.1 to ask for devices, if not the one that is mounted into pods.
    #[arg(long)]
    driver_library: Option<PathBuf>,
    /// Directory that the kubelet keeps for device plugins.
    #[arg(long, default_value = DEFAULT_DIRECTORY)]
    plugin_dir: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    Sim,
    Real,
}

#[tokio::main]
async fn main() -> Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    run(Arguments::parse()).await
}

async fn run(arguments: Arguments) -> Result<()> {
    let access = match arguments.mode {
        Mode::Sim => Access::simulated(&arguments.library_dir, &arguments.gpusim_dir),
        Mode::Real => Access::real(&arguments.driver_root)?,
    };
    let library = match (arguments.driver_library, arguments.mode) {
        (Some(path), _) => path,
        (None, Mode::Sim) => arguments.library_dir.join(access::NVML),
        (None, Mode::Real) => find_library(&arguments.driver_root, access::NVML)?,
    };
    let devices = devices::watch(library).context("watch the devices")?;
    let plugin = Plugin::new(devices, access, arguments.replicas);
    kubelet::serve(&arguments.plugin_dir, &arguments.resource, plugin).await
}
