//! Brings a test cluster up, looks after it, and takes it down. Run it as root.
//!
//! Of several on this machine, HIGHWATER_E2E_CLUSTER says which is meant: 0 (the default) to 7.

use std::{
    ffi::OsString,
    fmt::Write as _,
    io::Write as _,
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use highwater_e2e::{
    Cluster, NAMESPACE,
    components::Build,
    control::{self, Request},
    lifecycle, node,
    paths::Paths,
    prometheus,
    spec::Spec,
    supervisor,
};

/// Parts of the product whose pods have logs of their own.
const PRODUCT: [&str; 3] = ["agent", "keeper", "operator"];

#[derive(Debug, Parser)]
#[command(name = "cluster", about)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Bring the cluster up, or up to date
    Up {
        #[command(flatten)]
        spec: Spec,
        #[command(flatten)]
        build: Build,
    },
    /// End the cluster and whatever a killed run left behind
    Down,
    /// Show the components and their state, and the product's pods
    Status,
    /// Rebuild the product and import the images that changed
    Images {
        #[command(flatten)]
        build: Build,
    },
    /// Install or upgrade the product by its charts
    Install {
        /// Values on top of those of the test cluster
        #[arg(long, short = 'f')]
        values: Vec<PathBuf>,
    },
    /// Uninstall the product
    Uninstall,
    /// Start a Prometheus that scrapes the product, or end it
    Prometheus {
        /// End it
        #[arg(long)]
        stop: bool,
    },
    /// Look at or change a node's simulated GPUs: `cluster gpusim n1 -- show`
    Gpusim {
        /// The node
        node: String,
        /// Arguments of `gpusim ctl`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Add nodes whose kubelets kwok stands in for, f1, f2, ...
    Fleet {
        /// How many there are to be; 0 removes them
        #[arg(long)]
        nodes: usize,
        /// For how many of them an agent is to run, with simulated GPUs of its own
        #[arg(long, default_value_t = 0)]
        agents: usize,
    },
    /// Build the parts alone, for use without a cluster; print the folder that they are in
    #[command(name = "build")]
    Parts {
        #[command(flatten)]
        build: Build,
    },
    /// Run kubectl as the administrator: `cluster kubectl -- get pods -A`
    Kubectl {
        /// Arguments of kubectl
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Run a command in the cluster's network, or inside a node
    Exec {
        /// The node whose mounts, processes and network to enter
        #[arg(long)]
        node: Option<String>,
        /// The command and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<OsString>,
    },
    /// Show the end of a component's log, or of the supervisor's, or of the product's agent, keeper or
    /// operator
    Logs {
        /// The component's name
        name: String,
        /// Go on showing what comes
        #[arg(long, short)]
        follow: bool,
    },
    /// Start a component that was stopped or killed
    Start {
        /// The component's name
        name: String,
    },
    /// End a component with SIGTERM and leave it down
    Stop {
        /// The component's name
        name: String,
    },
    /// End a component with SIGKILL and leave it down
    Kill {
        /// The component's name
        name: String,
    },
    /// Halt a component in mid-flight (SIGSTOP)
    Pause {
        /// The component's name
        name: String,
    },
    /// Let a paused component go on
    Resume {
        /// The component's name
        name: String,
    },
    #[command(hide = true)]
    Supervise,
    #[command(hide = true)]
    Discover,
    #[command(hide = true)]
    NodeInit { name: String },
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env()
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info,kube_client=off")),
        )
        .with_target(false)
        .with_writer(std::io::stderr)
        .init();
    match run(Arguments::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<()> {
    let paths = Paths::from_env()?;
    let control = |request| control::send(&paths, &request).map(drop);
    match task {
        Task::Up { spec, build } => lifecycle::up(&paths, &spec, &build),
        Task::Down => lifecycle::down(&paths),
        Task::Status => status(&paths),
        Task::Images { build } => lifecycle::update(&paths, &build),
        Task::Install { values } => {
            lifecycle::in_cluster(async |cluster: &Cluster| cluster.install_with(&values).await)
        }
        Task::Uninstall => lifecycle::in_cluster(async |cluster: &Cluster| cluster.uninstall().await),
        Task::Prometheus { stop: true } => prometheus::stop(&paths),
        Task::Prometheus { stop: false } => {
            lifecycle::in_cluster(async |cluster: &Cluster| cluster.prometheus().await)?;
            tracing::info!("Prometheus answers at http://{} in the cluster's network", prometheus::ADDRESS);
            Ok(())
        }
        Task::Fleet { nodes, agents } => lifecycle::in_cluster(async |cluster: &Cluster| {
            for node in cluster.fleet(nodes).await?.iter().take(agents) {
                let agent = cluster.start_agent(node).await?;
                tracing::info!("{} runs; metrics at http://{}", agent.component, agent.address);
            }
            Ok(())
        }),
        Task::Gpusim { node, arguments } => lifecycle::in_cluster(async |cluster: &Cluster| {
            let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
            print!("{}", cluster.gpusim(&node, &arguments).await?);
            Ok(())
        }),
        Task::Parts { build } => {
            lifecycle::build(&paths, &build)?;
            println!("{}", paths.bin().display());
            Ok(())
        }
        Task::Kubectl { arguments } => become_program(Cluster::attach()?.kubectl_command().args(arguments)),
        Task::Exec { node: None, command } => {
            Cluster::attach()?;
            let (program, arguments) = command.split_first().context("a command to run")?;
            become_program(Command::new(program).args(arguments))
        }
        Task::Exec { node: Some(name), command } => {
            let pid = node::first_process(&paths, &name)?.as_raw_nonzero();
            become_program(
                Command::new("nsenter")
                    .args(["--mount", "--net", "--uts", "--pid", "--target"])
                    .args([&pid.to_string(), "--"])
                    .args(command),
            )
        }
        Task::Logs { name, follow } if PRODUCT.contains(&name.as_str()) => {
            let component = format!("app.kubernetes.io/component={name}");
            let mut kubectl = Cluster::attach()?.kubectl_command();
            kubectl.args(["logs", "--namespace", NAMESPACE, "--selector", &component]);
            kubectl.args(["--prefix", "--tail=200", &format!("--follow={follow}")]);
            become_program(&mut kubectl)
        }
        Task::Logs { name, follow } => {
            let log = paths.log(&name);
            ensure!(log.exists(), "no component {name} has run: `cluster status` lists them");
            let tail = if follow { "--follow" } else { "--quiet" };
            become_program(Command::new("tail").args(["--lines=200", tail]).arg(log))
        }
        Task::Start { name } => control(Request::Start(name)),
        Task::Stop { name } => control(Request::Stop(name)),
        Task::Kill { name } => control(Request::Kill(name)),
        Task::Pause { name } => control(Request::Pause(name)),
        Task::Resume { name } => control(Request::Resume(name)),
        Task::Supervise => supervisor::serve(&paths),
        Task::Discover => {
            lifecycle::in_cluster(async |cluster: &Cluster| prometheus::discover(cluster).await)
        }
        Task::NodeInit { name } => node::init(&paths, &name),
    }
}

/// Replaces this process by a program; returns only where that fails.
fn become_program(command: &mut Command) -> Result<()> {
    let error = command.exec();
    Err(error).with_context(|| format!("running {}", command.get_program().display()))
}

fn status(paths: &Paths) -> Result<()> {
    let mut table = format!("{:<28} {:>8} {:>8}  STATE\n", "COMPONENT", "PID", "RESTARTS");
    for component in lifecycle::status(paths)? {
        let pid = component.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let state = match (component.pid, component.wanted) {
            (Some(_), _) if component.paused => "paused".to_owned(),
            (Some(_), _) => "running".to_owned(),
            (None, true) => format!("failing: {}", component.last_end.unwrap_or_default()),
            (None, false) => "stopped".to_owned(),
        };
        writeln!(table, "{:<28} {pid:>8} {:>8}  {state}", component.name, component.restarts)?;
    }
    // Whoever reads may stop before the end (`head`).
    let _ = std::io::stdout().write_all(table.as_bytes());
    let mut pods = Cluster::attach()?.kubectl_command();
    pods.args(["get", "pods", "--namespace", NAMESPACE, "--output=wide", "--request-timeout=3s"]);
    // Without an API server it says so itself.
    pods.status().map(drop).context("running kubectl")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn every_subcommand_can_be_parsed() {
        Arguments::command().debug_assert();
        for task in [
            "up --nodes 2 --gpu-driver 615.10 --gpu-memory-limits force",
            "build",
            "logs keeper",
            "kubectl -- get pods -A",
            "exec --node n1 ps",
            "fleet --nodes 3",
        ] {
            Arguments::try_parse_from(std::iter::once("cluster").chain(task.split(' '))).unwrap();
        }
    }
}
