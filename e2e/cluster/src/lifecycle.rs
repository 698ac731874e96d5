//! Bringing the cluster up and down.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Api;
use rustix::fs::{FlockOperation, flock};

use crate::{
    cgroup,
    cluster::Cluster,
    components::{self, Build},
    control::{self, ComponentStatus, Request},
    control_plane, images, mount_points, network, node, packages,
    paths::{Paths, write},
    pki,
    spec::{Node, Spec},
    supervisor,
    wait::eventually,
};

/// Brings up a cluster of the given shape, or brings the one that is there up to date.
pub fn up(paths: &Paths, spec: &Spec, build: &Build) -> Result<()> {
    spec.validate()?;
    let clock = Instant::now();
    let _lock = build_parts(paths, build)?;
    tracing::info!("parts are ready after {:.1?}", clock.elapsed());
    match unhealthy(paths, spec) {
        None => refresh(paths, spec)?,
        Some(reason) => {
            if Spec::load(paths).is_some() {
                tracing::info!("making the cluster anew: {reason:#}");
            }
            clean(paths)?;
            create(paths, spec).inspect_err(|_| {
                tracing::error!(
                    "the logs are in {}; `cluster down` cleans up",
                    paths.state.join("logs").display()
                );
            })?;
        }
    }
    tracing::info!("the cluster is up after {:.1?}", clock.elapsed());
    Ok(())
}

/// Builds every part into the cluster's folder of binaries, and no more.
pub fn build(paths: &Paths, build: &Build) -> Result<()> {
    build_parts(paths, build).map(drop)
}

/// Rebuilds and re-imports what changed, and restarts the simulators whose programs did.
pub fn update(paths: &Paths, build: &Build) -> Result<()> {
    let spec = Spec::load(paths).context("no cluster is up: run `cluster up`")?;
    let _lock = build_parts(paths, build)?;
    refresh(paths, &spec)
}

/// Ends everything that belongs to a cluster, also what a killed run left behind.
pub fn down(paths: &Paths) -> Result<()> {
    let _lock = lock(paths)?;
    clean(paths)
}

/// Builds what is to be built, which may take long and disturbs nobody, then puts it in place under
/// the lock, which it returns.
fn build_parts(paths: &Paths, build: &Build) -> Result<File> {
    packages::ensure()?;
    let go = components::build_go(paths)?;
    components::build_products(paths, build)?;
    let lock = lock(paths)?;
    components::place_go(paths, &go)?;
    components::place_products(paths, build)?;
    // By this name it can be read even where a later build has replaced it.
    components::place(Path::new("/proc/self/exe"), &paths.program("cluster"))?;
    Ok(lock)
}

/// How the components are; fails where no supervisor answers.
pub fn status(paths: &Paths) -> Result<Vec<ComponentStatus>> {
    control::send(paths, &Request::Status)
}

/// One bring-up or tear-down at a time.
fn lock(paths: &Paths) -> Result<File> {
    let path = paths.state.with_extension("lock");
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let file = File::create(&path)
        .with_context(|| format!("creating {} (the cluster needs root)", path.display()))?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        tracing::info!("another cluster command is at work: waiting for it");
        flock(&file, FlockOperation::LockExclusive)?;
    }
    Ok(file)
}

/// Why the running cluster cannot be used as it is; none where it can.
fn unhealthy(paths: &Paths, spec: &Spec) -> Option<anyhow::Error> {
    let check = || {
        let up = Spec::load(paths).context("none is up")?;
        if !complete(paths).exists() {
            bail!("it did not come up to the end");
        }
        if up != *spec {
            bail!("it has another shape");
        }
        for component in status(paths)? {
            if component.pid.is_none() && component.wanted {
                bail!("{} does not run ({})", component.name, component.last_end.unwrap_or_default());
            }
            if !component.wanted || component.paused {
                bail!("{} was stopped", component.name);
            }
        }
        in_cluster(async |cluster: &Cluster| cluster.nodes_ready(Duration::from_secs(15)).await)
    };
    check().err()
}

fn create(paths: &Paths, spec: &Spec) -> Result<()> {
    fs::create_dir_all(&paths.state)?;
    spec.save(paths)?;
    pki::issue(paths, spec)?;
    control_plane::prepare(paths)?;
    cgroup::create(paths.id, spec)?;
    network::create(paths.id, spec)?;
    mount_points::make(node::OWN_PATHS)?;
    for node in spec.nodes() {
        node::prepare(paths, node, spec)?;
        place_driver(paths, node)?;
    }
    supervisor::launch(paths)?;
    let add = |component| control::send(paths, &Request::Add(component));
    for component in control_plane::servers(paths) {
        add(component)?;
    }
    for node in spec.nodes() {
        for component in node::base_components(paths, node) {
            add(component)?;
        }
    }
    await_containerd(paths, spec)?;
    images::ensure(paths, spec)?;
    in_cluster(async |cluster: &Cluster| cluster.api_ready().await)?;
    for component in control_plane::controllers(paths) {
        add(component)?;
    }
    for node in spec.nodes() {
        for component in node::cluster_components(paths, node, spec) {
            add(component)?;
        }
    }
    in_cluster(async |cluster: &Cluster| {
        cluster.nodes_ready(Duration::from_mins(1)).await?;
        // No pod is admitted before its service account exists.
        let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client().await?, "default");
        eventually("the default service account", Duration::from_secs(30), async || {
            accounts.get("default").await.map(drop)
        })
        .await
    })?;
    write(&complete(paths), "")
}

/// Present once the cluster has come up to the end.
fn complete(paths: &Paths) -> PathBuf {
    paths.state.join("complete")
}

/// Brings a healthy cluster up to date with newly built binaries.
fn refresh(paths: &Paths, spec: &Spec) -> Result<()> {
    let fresh = images::ensure(paths, spec)?;
    if !fresh.is_empty() {
        tracing::info!("imported {}", fresh.join(", "));
    }
    let running = status(paths)?;
    for node in spec.nodes() {
        place_driver(paths, node)?;
        let simulators = [node::gpusim(paths, node), node::device_plugin(paths, node, spec)];
        for component in simulators.into_iter().flatten() {
            let known = running.iter().find(|known| known.name == component.name);
            if known.is_none_or(runs_an_old_program) {
                tracing::info!("starting the {} that was just built", component.name);
                control::send(paths, &Request::Add(component))?;
            }
        }
    }
    Ok(())
}

/// Whether the file that a component was started from has been replaced since.
fn runs_an_old_program(component: &ComponentStatus) -> bool {
    let program = component.pid.and_then(|pid| fs::read_link(format!("/proc/{pid}/exe")).ok());
    program.is_some_and(|program| program.to_string_lossy().ends_with(" (deleted)"))
}

/// Puts the simulated driver's libraries where a node looks for them.
fn place_driver(paths: &Paths, node: Node) -> Result<()> {
    for library in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let built = paths.program(library);
        if built.exists() {
            let folder = paths.on_node(&node.name(), node::DRIVER_LIBRARIES);
            components::place(&built, &folder.join(library))?;
        }
    }
    Ok(())
}

/// Removes everything but the built binaries.
fn clean(paths: &Paths) -> Result<()> {
    cgroup::kill_all(paths.id)?;
    network::remove(paths.id)?;
    cgroup::remove(paths.id)?;
    mount_points::remove()?;
    let is_ours = Spec::load(paths).is_some();
    if paths.state.exists() && !is_ours && fs::read_dir(&paths.state)?.next().is_some() {
        let state = paths.state.display();
        bail!("{state} holds something else than a cluster's state: remove it, or set HIGHWATER_E2E_DIR");
    }
    let of_parts = ["etcd", "fleet", "prometheus"].map(|part| paths.data.join(part));
    let of_nodes = Node::all().map(|node| paths.node(&node.name()));
    // The state is the last: it tells that the others are a cluster's.
    for folder in of_parts.into_iter().chain(of_nodes).chain([paths.state.clone()]) {
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("removing {}", folder.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

fn await_containerd(paths: &Paths, spec: &Spec) -> Result<()> {
    for node in spec.nodes() {
        let deadline = Instant::now() + Duration::from_secs(20);
        let name = node.name();
        while let Err(error) =
            node::output(paths, &name, std::process::Command::new("/usr/bin/ctr").arg("version"))
        {
            if Instant::now() > deadline {
                let log = paths.log(&format!("containerd-{node}"));
                return Err(
                    error.context(format!("containerd of {node} does not answer: see {}", log.display()))
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    Ok(())
}

/// Runs something in the cluster's network, which this thread stays out of.
pub fn in_cluster<T: Send>(work: impl AsyncFnOnce(&Cluster) -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                let cluster = Cluster::attach()?;
                cluster.block_on(work(&cluster))?
            })
            .join()
            .map_err(|_| anyhow::anyhow!("the thread in the cluster's network panicked"))?
    })
}
