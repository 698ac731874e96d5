//! The simulated driver's daemon, and the tool that changes it while it runs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use gpusim::client::Client;
use gpusim::config::Config;
use gpusim::daemon::Daemon;
use gpusim::fault::{Fault, FaultKind};
use gpusim::protocol::{
    CheckpointStep, Control, DEFAULT_SOCKET, ProcessList, Region, Reply, SOCKET_VARIABLE,
};
use gpusim::size::Bytes;

/// Simulates the NVIDIA driver of one host.
#[derive(Debug, Parser)]
#[command(name = "gpusim", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a host's devices.
    Daemon {
        #[command(flatten)]
        socket: Socket,
        /// JSON file that describes the host; one H200 where absent.
        #[arg(long)]
        config: Option<PathBuf>,
    },
    /// Look at or change a running simulator.
    Ctl {
        #[command(flatten)]
        socket: Socket,
        #[command(subcommand)]
        action: Action,
    },
}

#[derive(Debug, Args)]
struct Socket {
    /// The daemon's socket.
    #[arg(long, env = SOCKET_VARIABLE, default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print devices, memory, holders and faults as JSON.
    Show,
    /// Become another host.
    Reconfigure {
        /// JSON file that describes the host.
        config: PathBuf,
        /// Even while processes hold memory, which they lose.
        #[arg(long)]
        force: bool,
    },
    /// Begin a fault.
    Inject {
        #[command(flatten)]
        place: Place,
        #[command(subcommand)]
        fault: Injection,
    },
    /// End faults: all, or those of one device or kind.
    Clear {
        /// Device index or UUID.
        #[arg(long)]
        device: Option<String>,
        /// Kind, as it is named for `inject`.
        #[arg(long)]
        kind: Option<String>,
    },
    /// Reset a device, or all: end its faults and empty it.
    Reset {
        /// Device index or UUID.
        #[arg(long)]
        device: Option<String>,
        /// Even while processes hold memory, which they lose.
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Args)]
struct Place {
    /// Index or UUID of a device, or UUID of a MIG instance.
    #[arg(long, default_value = "0")]
    device: String,
}

#[derive(Debug, Subcommand)]
enum Injection {
    /// The process lists give no number of bytes.
    MissingProcessMemory {
        /// For this host PID alone.
        #[arg(long)]
        pid: Option<u32>,
    },
    /// The device's memory cannot be read.
    MissingMemory,
    /// The device has fallen off the bus.
    Lost,
    /// Every call about the device takes longer.
    Slow {
        /// By so much.
        #[arg(long)]
        milliseconds: u64,
    },
    /// A living process of the host, whatever it is, holds memory until it ends.
    Foreign {
        /// Its host PID.
        #[arg(long)]
        pid: u32,
        /// How much, for example 8Gi.
        #[arg(long)]
        bytes: Bytes,
        /// The list that shows it: compute, graphics or mps.
        #[arg(long, default_value = "compute")]
        list: ProcessList,
    },
    /// A process that is gone is still listed with memory.
    Zombie {
        /// The host PID that it had.
        #[arg(long)]
        pid: u32,
        /// How much, for example 8Gi.
        #[arg(long)]
        bytes: Bytes,
    },
    /// Memory is in use and no process is listed for it.
    Unexplained {
        /// How much, for example 8Gi.
        #[arg(long)]
        bytes: Bytes,
    },
    /// Every second read of the device's memory shows more.
    Torn {
        /// How much more, for example 8Gi.
        #[arg(long)]
        bytes: Bytes,
        /// End after so many of those reads.
        #[arg(long)]
        reads: Option<u32>,
    },
    /// Memory of processes that die from now on never comes back.
    Stuck {
        /// The dead process stays in the lists.
        #[arg(long)]
        listed: bool,
    },
    /// A step of checkpoints fails, for every process that has the device open.
    Checkpoint {
        /// lock, checkpoint, restore or unlock.
        #[arg(long)]
        step: CheckpointStep,
        /// The process is lost by it.
        #[arg(long)]
        loses: bool,
    },
}

impl From<Injection> for FaultKind {
    fn from(injection: Injection) -> Self {
        match injection {
            Injection::MissingProcessMemory { pid } => Self::MissingProcessMemory { pid },
            Injection::MissingMemory => Self::MissingMemory,
            Injection::Lost => Self::Lost,
            Injection::Slow { milliseconds } => Self::Slow { milliseconds },
            Injection::Foreign { pid, bytes, list } => Self::Foreign { pid, bytes, list },
            Injection::Zombie { pid, bytes } => Self::Zombie { pid, bytes },
            Injection::Unexplained { bytes } => Self::Unexplained { bytes },
            Injection::Torn { bytes, reads } => Self::Torn { bytes, reads, raised: false },
            Injection::Stuck { listed } => Self::Stuck { listed },
            Injection::Checkpoint { step, loses } => Self::Checkpoint { step, loses },
        }
    }
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Daemon { socket, config } => daemon(&socket.socket, config.as_deref()),
        Command::Ctl { socket, action } => control(&socket.socket, action),
    }
}

fn daemon(socket: &Path, config: Option<&Path>) -> Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let config = config.map_or_else(|| Ok(Config::default()), read_config)?;
    let daemon = Daemon::bind(socket, config).with_context(|| format!("listen at {}", socket.display()))?;
    tracing::info!(socket = %socket.display(), "serving");
    daemon.serve().context("serve")
}

fn control(socket: &Path, action: Action) -> Result<()> {
    let mut client = Client::connect(socket).with_context(|| {
        format!("no simulator serves at {}: start `gpusim daemon` there", socket.display())
    })?;
    let control = match action {
        Action::Show => Control::Show,
        Action::Reconfigure { config, force } => {
            Control::Reconfigure { config: read_config(&config)?, force }
        }
        Action::Inject { place, fault } => {
            Control::Inject(Fault { region: find(&mut client, &place.device)?, kind: fault.into() })
        }
        Action::Clear { device, kind } => Control::Clear { device: find_device(&mut client, device)?, kind },
        Action::Reset { device, force } => {
            Control::Reset { device: find_device(&mut client, device)?, force }
        }
    };
    match client.control(control)? {
        Reply::State(state) => println!("{}", serde_json::to_string_pretty(&state)?),
        Reply::Cleared(count) => println!("{count} faults ended"),
        _ => {}
    }
    Ok(())
}

fn read_config(path: &Path) -> Result<Config> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    Config::from_json(&text).map_err(|reason| anyhow::anyhow!("{}: {reason}", path.display()))
}

fn find_device(client: &mut Client, name: Option<String>) -> Result<Option<u32>> {
    name.map(|name| find(client, &name).map(|region| region.device)).transpose()
}

/// A device by index or UUID, or a MIG instance by UUID.
fn find(client: &mut Client, name: &str) -> Result<Region> {
    let inventory = client.show()?.inventory;
    for (device, facts) in (0..).zip(&inventory.devices) {
        if name == facts.uuid || name == device.to_string() {
            return Ok(Region { device, instance: None });
        }
        let mut instances = (0..).zip(&facts.instances);
        if let Some((instance, _)) = instances.find(|(_, instance)| instance.uuid == name) {
            return Ok(Region { device, instance: Some(instance) });
        }
    }
    let known: Vec<_> = inventory.devices.iter().map(|device| device.uuid.as_str()).collect();
    bail!("no device {name:?}: there are {}", known.join(", "))
}
