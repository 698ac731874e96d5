//! Serves the driver over a unix socket: a thread for each connection.

use std::fs::Permissions;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::cgroup::Hierarchy;
use crate::config::Config;
use crate::driver::{ClientId, Driver};
use crate::epoch::{Epoch, Page};
use crate::exports::Exports;
use crate::fault::{Fault, FaultKind};
use crate::files;
use crate::identity::{Identity, Peer, watch};
use crate::protocol::{CheckpointStep, Control, Failure, Region, Reply, Request, receive, send, send_with};

/// Enough for a request and its reply; hundreds of processes may be connected.
const STACK: usize = 256 << 10;
/// Before trying again what went wrong for a reason that passes.
const RETRY: Duration = Duration::from_millis(20);
/// Between two looks whether a process that is locked may go on.
const STOPPED: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// A daemon that listens but does not serve yet.
#[derive(Debug)]
pub struct Daemon {
    listener: UnixListener,
    driver: Shared,
}

#[derive(Debug, Clone)]
struct Shared(Arc<Host>);

/// What is said beside a descriptor.
const DONE: Result<Reply, Failure> = Ok(Reply::Done);

#[derive(Debug)]
struct Host {
    state: Mutex<(Driver, Epoch)>,
    /// What clients see of the epoch; none where the kernel is too old for a page that they cannot
    /// write to.
    page: Option<Page>,
    exports: Exports,
    socket: PathBuf,
}

/// The driver, which nobody else has meanwhile. What is done to it is published before anybody can
/// be told that it is done.
struct Locked<'a> {
    state: MutexGuard<'a, (Driver, Epoch)>,
    page: Option<&'a Page>,
    changed: bool,
}

impl Locked<'_> {
    /// As [`Driver::answer`].
    fn answer(&mut self, client: ClientId, request: Request, now: Instant) -> Result<Reply, Failure> {
        self.changed |= !request.is_read();
        self.state.0.answer(client, request, now)
    }
}

impl Deref for Locked<'_> {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        &self.state.0
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Driver {
        self.changed = true;
        &mut self.state.0
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let (driver, epoch) = &mut *self.state;
        let shown = epoch.next(self.changed, driver.is_settled());
        if let Some(page) = self.page {
            page.publish(shown);
        }
    }
}

impl Shared {
    /// The driver as it is now: what was let go of before is free.
    fn lock(&self) -> Locked<'_> {
        // A panic in one request leaves the ledger as consistent as its last statement.
        let state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut driver = Locked { state, page: self.0.page.as_ref(), changed: false };
        // Until what was let go of is taken in, no reply is to be given again.
        let unsettle = || self.0.page.as_ref().map_or((), Page::unsettle);
        match self.exports().ended(unsettle) {
            Ok(pieces) => pieces.into_iter().for_each(|piece| driver.end_export(piece)),
            Err(error) => tracing::error!(%error, "cannot learn of closed descriptors"),
        }
        driver
    }

    fn exports(&self) -> &Exports {
        &self.0.exports
    }

    /// Makes the files of all devices that there are.
    fn make_files(&self) -> io::Result<()> {
        let devices = self.lock().config().each_device().count();
        files::make(&self.0.socket, u32::try_from(devices).unwrap_or(u32::MAX))
    }
}

impl Daemon {
    /// Listens at `path`, in the place of a daemon that is gone.
    ///
    /// # Errors
    /// When another daemon serves there, or the socket cannot be made.
    pub fn bind(path: &Path, config: Config) -> io::Result<Self> {
        if UnixStream::connect(path).is_ok() {
            let words = format!("another simulator serves at {}: stop it first", path.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, words));
        }
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        // Pods run as any user.
        std::fs::set_permissions(path, Permissions::from_mode(0o666))?;
        let page = Page::create().inspect_err(|error| {
            tracing::warn!(%error, "no page for the epoch: every read crosses the socket");
        });
        let host = Host {
            state: Mutex::new((Driver::new(config), Epoch::default())),
            page: page.ok(),
            exports: Exports::new()?,
            socket: path.to_owned(),
        };
        let driver = Shared(Arc::new(host));
        driver.make_files()?;
        Ok(Self { listener, driver })
    }

    /// Serves for ever.
    ///
    /// # Errors
    /// When no connection can be accepted any more.
    pub fn serve(self) -> io::Result<()> {
        raise_descriptor_limit();
        let driver = self.driver.clone();
        thread::Builder::new().name("exports".into()).spawn(move || end_exports(&driver))?;
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                // One that is gone already, or more than there is room for at the moment.
                Err(error) if is_passing(&error) => {
                    tracing::warn!(%error, "could not accept a connection");
                    thread::sleep(RETRY);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let driver = self.driver.clone();
            let started = thread::Builder::new().stack_size(STACK).spawn(move || match Peer::of(&stream) {
                Ok(peer) => serve_client(&driver, stream, &peer),
                Err(error) => tracing::warn!(%error, "refused a connection: its process is not known"),
            });
            if let Err(error) = started {
                tracing::warn!(%error, "refused a connection: no thread for it");
            }
        }
    }
}

/// Each process costs two descriptors, and each exported piece of memory one.
fn raise_descriptor_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        // Where it may not be raised there is room for fewer.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
}

fn is_passing(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let passing = [Errno::CONNABORTED, Errno::INTR, Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| passing.contains(&errno))
}

/// Frees what descriptors kept, when they are closed.
fn end_exports(driver: &Shared) {
    loop {
        if let Err(error) = driver.exports().wait() {
            tracing::error!(%error, "cannot wait for closed descriptors");
            thread::sleep(RETRY);
        }
        drop(driver.lock());
    }
}

/// Answers one process until it is gone or has closed its end, then takes back what it held.
fn serve_client(driver: &Shared, mut stream: UnixStream, peer: &Peer) {
    let client = driver.lock().connect(peer.identity.clone());
    note_cgroup(driver, client, peer);
    if let Err(error) = answer_requests(driver, client, &mut stream, peer) {
        tracing::debug!(pid = peer.identity.pid, %error, "connection ended");
    }
    driver.lock().disconnect(client, Instant::now());
}

fn answer_requests(
    driver: &Shared,
    client: ClientId,
    stream: &mut UnixStream,
    peer: &Peer,
) -> io::Result<()> {
    let mut buffer = Vec::new();
    // The end of the stream is not enough: children inherit the socket and may outlive the
    // process. The process's own end is not enough either: it may replace itself by `exec`.
    while wait_for_request(stream, peer)? {
        let Some(request) = receive::<Request>(stream, &mut buffer)? else { break };
        if !wait_while_stopped(driver, client, &request, peer)? {
            break;
        }
        let delay = driver.lock().delay(client, &request);
        if !delay.is_zero() {
            thread::sleep(delay);
        }
        let reply = match request {
            Request::Control(control) => answer_control(driver, client, control, peer),
            Request::Export(allocation) => match export(driver, client, allocation) {
                Ok(descriptor) => {
                    // Our duplicate of the descriptor ends with this statement.
                    send_with(stream, &DONE, descriptor.as_fd())?;
                    continue;
                }
                Err(failure) => Err(failure),
            },
            Request::Epoch => match &driver.0.page {
                Some(page) => {
                    send_with(stream, &DONE, page.descriptor())?;
                    continue;
                }
                None => Err(Failure::NotSupported),
            },
            Request::Ends => {
                send_with(stream, &DONE, driver.exports().descriptor())?;
                continue;
            }
            Request::Import(descriptor) => match driver.exports().piece(descriptor) {
                Some(piece) => driver.lock().import(client, piece),
                None => Err(Failure::NotShareable),
            },
            Request::SetLimits { region, namespace, soft, hard } => {
                set_limits(driver, peer, region, &namespace, (soft, hard))
            }
            Request::GetLimits { region, namespace } => limits(driver, region, &namespace),
            Request::Checkpoint { pid, step } => checkpoint(driver, client, peer, pid, step),
            request => {
                look_up_cgroup(driver, client, &request, peer);
                let asked = request.clone();
                let answer = driver.lock().answer(client, request, Instant::now());
                if answer == Err(Failure::OutOfMemory) {
                    // A guard that refuses asks nobody here: what is read is the driver's refusal.
                    tracing::info!(pid = peer.identity.pid, ?asked, "out of memory");
                }
                answer
            }
        };
        send(stream, &reply)?;
    }
    Ok(())
}

/// Waits while the process is locked or on the host. False when it is gone.
fn wait_while_stopped(driver: &Shared, client: ClientId, request: &Request, peer: &Peer) -> io::Result<bool> {
    while driver.lock().is_stopped(client, request) {
        let mut gone = [PollFd::new(&peer.pidfd, PollFlags::IN)];
        match poll(&mut gone, Some(&STOPPED)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

/// Moves a process to the host or back. The step goes on to its end if who asked for it is killed.
fn checkpoint(
    driver: &Shared,
    client: ClientId,
    peer: &Peer,
    pid: u32,
    step: CheckpointStep,
) -> Result<Reply, Failure> {
    if !may_change(peer) {
        return Err(Failure::Forbidden);
    }
    let begun = driver.lock().begin_step(client, pid, step)?;
    if !begun.lasts.is_zero() {
        thread::sleep(begun.lasts);
    }
    driver.lock().end_step(&begun)?;
    Ok(Reply::Done)
}

/// What a process makes counts for its cgroup, also before that is limited.
fn note_cgroup(driver: &Shared, client: ClientId, peer: &Peer) {
    let hierarchy = Hierarchy::of(driver.lock().config());
    if let Some(cgroup) = hierarchy.ok().and_then(|hierarchy| hierarchy.of_process(peer.identity.pid)) {
        driver.lock().set_cgroup(client, &cgroup);
    }
}

/// A new descriptor that keeps an allocation.
fn export(driver: &Shared, client: ClientId, allocation: u64) -> Result<OwnedFd, Failure> {
    let piece = driver.lock().export(client, allocation)?;
    driver.exports().make(piece).map_err(|error| {
        driver.lock().end_export(piece);
        tracing::error!(%error, "no descriptor for exported memory");
        Failure::NotSupported
    })
}

/// Limits hold for where a process is when it asks for memory, and only while the cgroup lasts.
fn look_up_cgroup(driver: &Shared, client: ClientId, request: &Request, peer: &Peer) {
    let asks_for_memory = matches!(
        request,
        Request::Allocate { .. }
            | Request::Resize { .. }
            | Request::CreateContext(_)
            | Request::MemoryWithinLimits(_)
    );
    if !asks_for_memory {
        return;
    }
    let hierarchy = {
        let driver = driver.lock();
        let region = driver.concerns(client, request);
        if !region.is_some_and(|region| driver.is_limited(region.device)) {
            return;
        }
        Hierarchy::of(driver.config())
    };
    let Ok(hierarchy) = hierarchy else { return };
    let cgroup = hierarchy.of_process(peer.identity.pid);
    let mut driver = driver.lock();
    driver.retain_limits(|limited| hierarchy.has(limited));
    if let Some(cgroup) = cgroup {
        driver.set_cgroup(client, &cgroup);
    }
}

fn set_limits(
    driver: &Shared,
    peer: &Peer,
    region: Region,
    namespace: &str,
    (soft, hard): (u64, u64),
) -> Result<Reply, Failure> {
    let hierarchy = Hierarchy::of(driver.lock().config())?;
    if !may_change(peer) {
        return Err(Failure::Forbidden);
    }
    let cgroup = hierarchy.named(namespace)?;
    driver.lock().set_limit(region, cgroup, soft, hard)?;
    tracing::info!(?region, namespace, soft, hard, "limits");
    Ok(Reply::Done)
}

fn limits(driver: &Shared, region: Region, namespace: &str) -> Result<Reply, Failure> {
    let hierarchy = Hierarchy::of(driver.lock().config())?;
    let cgroup = hierarchy.named(namespace)?;
    let mut driver = driver.lock();
    driver.retain_limits(|limited| hierarchy.has(limited));
    driver.limit(region, &cgroup)
}

/// Root and the daemon's own user.
fn may_change(peer: &Peer) -> bool {
    peer.uid == 0 || peer.uid == rustix::process::geteuid().as_raw()
}

/// Waits for the next request. False when the process is gone.
fn wait_for_request(stream: &UnixStream, peer: &Peer) -> io::Result<bool> {
    let mut ready = [PollFd::new(stream, PollFlags::IN), PollFd::new(&peer.pidfd, PollFlags::IN)];
    loop {
        match poll(&mut ready, None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => break,
        }
    }
    let [_, gone] = ready;
    Ok(gone.revents().is_empty())
}

fn answer_control(
    driver: &Shared,
    client: ClientId,
    control: Control,
    peer: &Peer,
) -> Result<Reply, Failure> {
    if !may_change(peer) {
        return Err(Failure::Forbidden);
    }
    tracing::info!(pid = peer.identity.pid, ?control, "control");
    match control {
        Control::Inject(fault) => inject(driver, fault).map(|()| Reply::Done),
        control => {
            let another_host = matches!(control, Control::Reconfigure { .. });
            let reply = driver.lock().answer(client, Request::Control(control), Instant::now())?;
            if another_host {
                driver.make_files().map_err(|error| Failure::Invalid(error.to_string()))?;
            }
            Ok(reply)
        }
    }
}

/// Begins a fault, and finds the process that it names.
fn inject(driver: &Shared, fault: Fault) -> Result<(), Failure> {
    match fault.kind {
        FaultKind::Foreign { pid, .. } => {
            let missing = |error| {
                Failure::Invalid(format!("no process {pid} ({error}): use zombie for one that is gone"))
            };
            let identity = Identity::of(pid).map_err(missing)?;
            let pidfd = watch(pid).map_err(missing)?;
            driver.lock().inject(fault, Some(identity))?;
            let driver = driver.clone();
            let watcher = thread::Builder::new().stack_size(STACK).spawn(move || {
                let mut gone = [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)];
                while poll(&mut gone, None).is_err() {}
                driver.lock().end_foreign(pid);
            });
            watcher.map(drop).map_err(|error| Failure::Invalid(error.to_string()))
        }
        FaultKind::Zombie { pid, .. } => {
            let shown = Identity::departed(pid).map_err(|error| Failure::Invalid(error.to_string()))?;
            driver.lock().inject(fault, Some(shown))
        }
        _ => driver.lock().inject(fault, None),
    }
}
