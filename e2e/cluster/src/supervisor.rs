//! Keeps the cluster's programs running and lets tests stop, pause and kill single ones.
//!
//! One thread a component starts it, waits for its end, and starts it again while it is wanted.
//! The controller manager and the scheduler need this in earnest: they give up when the API server
//! is away for long.

use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    process::{Child, Command, Stdio},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::{
    cgroup,
    control::{self, Component, ComponentStatus, Request, Response},
    namespace::{self, Place},
    node,
    paths::{self, Paths, write},
};

/// How long a component may take to end after SIGTERM. The API server would take a minute for as
/// long as somebody watches, and answer some meanwhile.
const GRACE: Duration = Duration::from_secs(3);

/// How long the kernel may take to start a process, or to end one after SIGKILL.
const PATIENCE: Duration = Duration::from_secs(10);

/// A run shorter than this counts as a failed start, and the next one waits longer.
const SHORT_RUN: Duration = Duration::from_secs(10);

/// Starts the supervisor in the background and waits until it answers.
pub fn launch(paths: &Paths) -> Result<()> {
    let log = open_log(paths, "supervisor")?;
    Command::new(paths.program("cluster"))
        .arg("supervise")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("starting the supervisor")?;
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Err(error) = control::send(paths, &Request::Status) {
        if Instant::now() > deadline {
            return Err(error.context(format!("see {}", paths.log("supervisor").display())));
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The supervisor itself: serves requests until it is killed.
pub fn serve(paths: &Paths) -> Result<()> {
    // Its own session, so that it outlives the terminal of whoever brought the cluster up.
    let _ = rustix::process::setsid();
    cgroup::join(paths.id)?;
    let own_pid = rustix::process::getpid();
    write(&paths.pid_file("supervisor"), own_pid.as_raw_nonzero().to_string())?;
    let socket = paths.control_socket();
    let _ = fs::remove_file(&socket);
    let listener =
        UnixListener::bind(&socket).with_context(|| format!("listening at {}", socket.display()))?;
    let supervisor = Arc::new(Supervisor { paths: paths.clone(), components: Mutex::default() });
    for stream in listener.incoming() {
        let supervisor = Arc::clone(&supervisor);
        let stream = stream.context("accepting a request")?;
        thread::spawn(move || {
            if let Err(error) = supervisor.converse(&stream) {
                tracing::warn!("conversation ended: {error:#}");
            }
        });
    }
    Ok(())
}

#[derive(Debug)]
struct Supervisor {
    paths: Paths,
    components: Mutex<Vec<Arc<Supervised>>>,
}

impl Supervisor {
    fn converse(self: &Arc<Self>, stream: &UnixStream) -> Result<()> {
        for line in BufReader::new(stream).lines() {
            let result = serde_json::from_str(&line?)
                .context("reading the request")
                .and_then(|request| self.fulfil(request));
            let error = result.err().map(|error| format!("{error:#}"));
            let components = lock(&self.components).iter().map(|component| component.status()).collect();
            let mut answer = serde_json::to_vec(&Response { error, components })?;
            answer.push(b'\n');
            (&mut &*stream).write_all(&answer)?;
        }
        Ok(())
    }

    fn fulfil(self: &Arc<Self>, request: Request) -> Result<()> {
        match request {
            Request::Add(component) => self.add(component),
            Request::Remove(name) => self.remove(&name),
            Request::Start(name) => self.find(&name)?.start(),
            Request::Stop(name) => self.find(&name)?.stop(),
            Request::Kill(name) => self.find(&name)?.kill(),
            Request::Pause(name) => self.find(&name)?.pause(),
            Request::Resume(name) => self.find(&name)?.resume(),
            Request::Status => Ok(()),
        }
    }

    fn add(self: &Arc<Self>, component: Component) -> Result<()> {
        if self.find(&component.name).is_ok() {
            self.remove(&component.name)?;
        }
        let supervised = Arc::new(Supervised {
            component,
            run: Mutex::new(Run { wanted: true, ..Run::default() }),
            changed: Condvar::new(),
        });
        lock(&self.components).push(Arc::clone(&supervised));
        let supervisor = Arc::clone(self);
        let kept = Arc::clone(&supervised);
        thread::Builder::new()
            .name(supervised.component.name.clone())
            .spawn(move || supervisor.keep_running(&kept))?;
        supervised.wait_until("start", PATIENCE, |run| run.pid.is_some() || run.last_end.is_some())
    }

    fn remove(&self, name: &str) -> Result<()> {
        let component = self.find(name)?;
        component.stop()?;
        lock(&component.run).removed = true;
        component.changed.notify_all();
        lock(&self.components).retain(|other| other.component.name != name);
        Ok(())
    }

    fn find(&self, name: &str) -> Result<Arc<Supervised>> {
        let components = lock(&self.components);
        if let Some(found) = components.iter().find(|component| component.component.name == name) {
            return Ok(Arc::clone(found));
        }
        let known: Vec<_> = components.iter().map(|known| known.component.name.as_str()).collect();
        bail!("no component {name}: the cluster runs {}", known.join(", "))
    }

    fn keep_running(&self, supervised: &Supervised) {
        let name = &supervised.component.name;
        let mut failures = 0_u32;
        while supervised.wait_until_wanted() {
            let started = Instant::now();
            let end = match self.spawn(&supervised.component) {
                Ok(child) => self.await_end(supervised, child),
                Err(error) => format!("did not start: {error:#}"),
            };
            failures = if started.elapsed() < SHORT_RUN { failures + 1 } else { 0 };
            let unwanted = supervised.note_end(&end);
            tracing::info!("{name}: {end}");
            if !unwanted {
                let pause = Duration::from_millis(100) * 2_u32.pow(failures.min(5));
                supervised.pause_before_restart(pause);
            }
        }
    }

    fn spawn(&self, component: &Component) -> Result<Child> {
        if let Place::NewNode { name, .. } = &component.place {
            let _ = fs::remove_file(node::ready_file(&self.paths, name));
        }
        let log = open_log(&self.paths, &component.name)?;
        let mut command = Command::new(&component.program);
        command
            .args(&component.arguments)
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", "/root")
            .env(paths::CLUSTER_VARIABLE, self.paths.id.number().to_string())
            .env(paths::STATE_VARIABLE, &self.paths.state)
            .env(paths::DATA_VARIABLE, &self.paths.data)
            .envs(&component.environment)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        namespace::spawn(&component.place, &mut command, |name| self.first_process(name))
    }

    fn first_process(&self, name: &str) -> Result<Pid> {
        let pid = lock(&self.find(&node::component_name(name))?.run).pid;
        pid.filter(|_| node::ready_file(&self.paths, name).exists())
            .with_context(|| format!("node {name} is not up"))
    }

    fn await_end(&self, supervised: &Supervised, mut child: Child) -> String {
        let pid = Pid::from_child(&child);
        let pid_file = self.paths.pid_file(&supervised.component.name);
        if let Err(error) = write(&pid_file, pid.as_raw_nonzero().to_string()) {
            tracing::warn!("{error:#}");
        }
        supervised.note_start(pid);
        // The pid stays taken until the child is reaped, and that happens only after nobody
        // signals it any more.
        while let Err(rustix::io::Errno::INTR) =
            waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
        {}
        lock(&supervised.run).pid = None;
        let _ = fs::remove_file(pid_file);
        match child.wait() {
            Ok(status) => status.to_string(),
            Err(error) => format!("was lost: {error}"),
        }
    }
}

#[derive(Debug)]
struct Supervised {
    component: Component,
    run: Mutex<Run>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Run {
    wanted: bool,
    removed: bool,
    paused: bool,
    pid: Option<Pid>,
    starts: u32,
    last_end: Option<String>,
}

impl Supervised {
    fn status(&self) -> ComponentStatus {
        let run = lock(&self.run);
        ComponentStatus {
            name: self.component.name.clone(),
            pid: run.pid.map(|pid| pid.as_raw_nonzero().get()),
            wanted: run.wanted,
            paused: run.paused,
            restarts: run.starts.saturating_sub(1),
            last_end: run.last_end.clone(),
        }
    }

    fn start(&self) -> Result<()> {
        let mut run = lock(&self.run);
        run.wanted = true;
        self.changed.notify_all();
        drop(run);
        self.wait_until("start", PATIENCE, |run| run.pid.is_some())
    }

    fn stop(&self) -> Result<()> {
        // The first process of a pid namespace ignores SIGTERM from outside; a node has no other
        // way of being switched off.
        if matches!(self.component.place, Place::NewNode { .. }) {
            return self.kill();
        }
        self.end(Signal::TERM, GRACE).or_else(|_| self.kill())
    }

    fn kill(&self) -> Result<()> {
        self.end(Signal::KILL, PATIENCE)
    }

    fn end(&self, signal: Signal, limit: Duration) -> Result<()> {
        let mut run = lock(&self.run);
        run.wanted = false;
        if let Some(pid) = run.pid {
            kill_process(pid, signal)?;
            // A paused process sees no other signal until it goes on.
            kill_process(pid, Signal::CONT)?;
        }
        run.paused = false;
        self.changed.notify_all();
        drop(run);
        self.wait_until("end", limit, |run| run.pid.is_none())
    }

    fn pause(&self) -> Result<()> {
        self.signal(Signal::STOP, true)
    }

    fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT, false)
    }

    fn signal(&self, signal: Signal, paused: bool) -> Result<()> {
        let mut run = lock(&self.run);
        let pid = run.pid.with_context(|| format!("{} does not run", self.component.name))?;
        kill_process(pid, signal)?;
        run.paused = paused;
        Ok(())
    }

    fn note_start(&self, pid: Pid) {
        let mut run = lock(&self.run);
        run.pid = Some(pid);
        run.starts += 1;
        self.changed.notify_all();
        // Stopped between the decision to start and here: nobody has seen the pid to end it.
        if !run.wanted {
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Whether the end was asked for.
    fn note_end(&self, end: &str) -> bool {
        let mut run = lock(&self.run);
        run.paused = false;
        run.last_end = Some(end.to_owned());
        self.changed.notify_all();
        !run.wanted
    }

    /// Whether to start; false once the component is removed.
    fn wait_until_wanted(&self) -> bool {
        let run = lock(&self.run);
        let run = self
            .changed
            .wait_while(run, |run| !run.wanted && !run.removed)
            .unwrap_or_else(PoisonError::into_inner);
        !run.removed
    }

    fn pause_before_restart(&self, pause: Duration) {
        let run = lock(&self.run);
        let _ = self.changed.wait_timeout_while(run, pause, |run| run.wanted && !run.removed);
    }

    fn wait_until(&self, what: &str, limit: Duration, done: impl Fn(&Run) -> bool) -> Result<()> {
        let run = lock(&self.run);
        let (run, timeout) = self
            .changed
            .wait_timeout_while(run, limit, |run| !done(run))
            .unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            let last = run.last_end.as_deref().unwrap_or("nothing known of earlier runs");
            return Err(anyhow!("{} did not {what} within {limit:?} ({last})", self.component.name));
        }
        Ok(())
    }
}

fn open_log(paths: &Paths, name: &str) -> Result<File> {
    let path = paths.log(name);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .with_context(|| format!("opening {}", path.display()))
}

/// A panic of another thread leaves nothing half done that matters here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
