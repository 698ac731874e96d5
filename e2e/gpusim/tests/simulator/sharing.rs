//! Memory that descriptors keep, and who is charged for it.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gpusim::client::Client;
use gpusim::protocol::{Descriptor, Failure, MemoryKind, ProcessList, Region, Reply, Request};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use crate::SERVER;
use crate::host::{self, GIB, Host, MIB};

const CONTEXT: u64 = 518 * MIB;
const WHOLE: Region = Region { device: 0, instance: None };

/// A host whose memory is all somebody's.
fn host() -> Host {
    Host::start(&json!({ "contextOverhead": 0, "openOverhead": 0 }))
}

/// A descriptor from a workload that shares one: this process never loads a driver.
fn take(path: &Path) -> OwnedFd {
    let deadline = Instant::now() + Duration::from_secs(30);
    let stream = loop {
        match UnixStream::connect(path) {
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            result => break result.unwrap(),
        }
    };
    receive(&stream).unwrap()
}

fn receive(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 8];
    recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut beside, RecvFlags::CMSG_CLOEXEC)?;
    let mut messages = beside.drain();
    let descriptor = messages.find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    descriptor.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn send(stream: &UnixStream, descriptor: &OwnedFd) {
    let descriptors = [descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    beside.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(stream, &[IoSlice::new(b"one byte")], &mut beside, SendFlags::empty()).unwrap();
}

/// A process of the simulated host that is this one: it speaks to the daemon without a library.
fn attach(host: &Host) -> Client {
    let mut client = host.client();
    client.call(&Request::Attach { devices: vec![0], lists: vec![ProcessList::Compute] }).unwrap();
    client
}

fn create(client: &mut Client, bytes: u64) -> u64 {
    let request = Request::Allocate { region: WHOLE, kind: MemoryKind::Physical, bytes, context: None };
    let Reply::Made(id) = client.call(&request).unwrap() else { panic!() };
    id
}

fn import(client: &mut Client, descriptor: &OwnedFd) -> Result<u64, String> {
    let file = Descriptor::of(descriptor.as_fd()).unwrap();
    match client.call(&Request::Import(file)) {
        Ok(Reply::Shared { id, .. }) => Ok(id),
        other => Err(format!("{other:?}")),
    }
}

fn used(client: &mut Client) -> u64 {
    let Reply::Memory(memory) = client.call(&Request::Memory(WHOLE)).unwrap() else { panic!() };
    memory.used
}

/// Waits until so much is in use, and says how long that took.
fn until(client: &mut Client, bytes: u64) -> Duration {
    let start = Instant::now();
    while used(client) != bytes {
        assert!(start.elapsed() < Duration::from_secs(30), "{} in use", used(client));
        std::thread::sleep(Duration::from_micros(200));
    }
    start.elapsed()
}

#[test]
fn a_descriptor_alone_keeps_memory_whoever_has_it() {
    let host = host();
    let path = host.path("share");
    let mut creator = host.workload(&format!("share 1Gi at {}; hold", path.display()));
    let descriptor = take(&path);
    creator.kill();
    let mut watcher = attach(&host);
    assert_eq!(used(&mut watcher), GIB, "its creator is gone");
    assert_eq!(host.charged(0), []);
    assert_eq!(host.show()["kept"], json!([{ "region": { "device": 0 }, "chunks": 1, "bytes": GIB }]));

    let duplicate = descriptor.try_clone().unwrap();
    drop(descriptor);
    assert_eq!(used(&mut watcher), GIB, "a duplicate is as good");

    // Another program, in namespaces of its own where these may be made.
    let prefix = host::namespaces().unwrap_or_else(|| vec!["env".into()]);
    let mut command = Command::new(&prefix[0]);
    command.args(&prefix[1..]).args(["sleep", "1000"]).stdin(Stdio::from(duplicate));
    let mut holder = command.spawn().unwrap();
    drop(command);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(used(&mut watcher), GIB, "a process that never loaded the driver has it");
    holder.kill().unwrap();
    holder.wait().unwrap();
    until(&mut watcher, 0);
}

#[test]
fn a_descriptor_on_its_way_keeps_memory() {
    let host = host();
    let mut client = attach(&host);
    let id = create(&mut client, GIB);
    let (ours, theirs) = UnixStream::pair().unwrap();
    send(&ours, &client.export(id).unwrap());
    client.call(&Request::Free(id)).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(used(&mut client), GIB, "nobody has it but the socket");
    let arrived = receive(&theirs).unwrap();
    assert_eq!(used(&mut client), GIB);
    send(&ours, &arrived);
    drop(arrived);
    assert_eq!(used(&mut client), GIB);
    // Nobody takes it out any more.
    drop((ours, theirs));
    until(&mut client, 0);
}

#[test]
fn what_the_last_descriptor_kept_is_free_once_that_is_closed() {
    let host = host();
    let (mut client, mut other) = (attach(&host), attach(&host));
    let mut observer = host.watcher();
    // More than half of the device.
    let bytes = 60 * GIB;
    let (rounds, mut late) = (400, 0);
    for _ in 0..rounds {
        let id = create(&mut client, bytes);
        let descriptor = client.export(id).unwrap();
        client.call(&Request::Free(id)).unwrap();
        assert_eq!([used(&mut observer), used(&mut observer)], [bytes, bytes]);
        drop(descriptor);
        let seen = used(&mut observer);
        let request = Request::Allocate { region: WHOLE, kind: MemoryKind::Physical, bytes, context: None };
        match other.call(&request) {
            Ok(Reply::Made(id)) => drop(other.call(&Request::Free(id)).unwrap()),
            _ => late += 1,
        }
        late += u32::from(seen != 0);
        until(&mut client, 0);
    }
    // A program that another test starts has a duplicate until it runs.
    assert!(late <= rounds / 50, "{late} times it was not free yet");
}

#[test]
fn an_exporter_with_a_context_is_charged_then_the_importer() {
    let host = host();
    let path = host.path("share");
    let mut exporter = host.workload(&format!("context; share 1Gi at {}; hold", path.display()));
    exporter.await_line("result op=export");
    assert_eq!(host.charged(0), [(exporter.pid(), SERVER)]);
    let importer = host.workload(&format!("import {} map; hold", path.display()));
    importer.await_line("result op=import bytes=1073741824 code=0");
    let mut charged = host.charged(0);
    charged.sort_unstable();
    let mut expected = [(exporter.pid(), SERVER), (importer.pid(), CONTEXT)];
    expected.sort_unstable();
    assert_eq!(charged, expected, "one of them for the chunk");
    exporter.kill();
    host.await_that("the importer is charged", || host.charged(0) == [(importer.pid(), SERVER)]);
    host.await_used(0, SERVER);
}

#[test]
fn nobody_is_charged_for_what_a_process_without_a_context_shared() {
    let host = host();
    let path = host.path("share");
    let mut exporter = host.workload(&format!("share 2Gi at {}; hold", path.display()));
    let descriptor = take(&path);
    let importers: Vec<_> = ["context; import PATH map; hold", "import PATH map; hold", "import PATH; hold"]
        .iter()
        .map(|script| host.workload(&script.replace("PATH", &path.display().to_string())))
        .collect();
    for importer in &importers {
        importer.await_line("result op=import bytes=2147483648 code=0");
    }
    // As measured with three importers, two of them with a context.
    let charged = |host: &Host| {
        let mut charged = host.charged(0);
        charged.sort_unstable();
        charged
    };
    let mut contexts = [(importers[0].pid(), CONTEXT), (importers[1].pid(), CONTEXT)];
    contexts.sort_unstable();
    assert_eq!(charged(&host), contexts);
    host.await_used(0, 2 * GIB + 2 * CONTEXT);
    exporter.kill();
    drop(descriptor);
    assert_eq!(charged(&host), contexts, "nor afterwards");
    host.await_used(0, 2 * GIB + 2 * CONTEXT);
    for (mut importer, left) in importers.into_iter().zip([2 * GIB + CONTEXT, 2 * GIB, 0]) {
        importer.kill();
        host.await_used(0, left);
    }
}

#[test]
fn memory_lives_by_the_last_of_handles_and_descriptors() {
    let host = host();
    let (mut maker, mut taker) = (attach(&host), attach(&host));
    let id = create(&mut maker, GIB);
    let (first, second) = (maker.export(id).unwrap(), maker.export(id).unwrap());
    let share = import(&mut taker, &first).unwrap();
    let again = import(&mut taker, &second).unwrap();
    assert_eq!(used(&mut maker), GIB, "once, however many hold it");
    drop((first, second));
    maker.call(&Request::Free(id)).unwrap();
    taker.call(&Request::Free(share)).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(used(&mut maker), GIB);
    taker.call(&Request::Free(again)).unwrap();
    until(&mut maker, 0);

    let id = create(&mut maker, GIB);
    let descriptor = maker.export(id).unwrap();
    let share = import(&mut taker, &descriptor).unwrap();
    let refused = taker.export(share).unwrap_err().to_string();
    assert_eq!(refused, Failure::NotShareable.to_string(), "what was imported cannot be exported");
    let other = std::fs::File::open("/proc/self/stat").unwrap();
    assert!(import(&mut taker, &OwnedFd::from(other)).is_err(), "a descriptor of something else");
    // A forced reset takes the memory from everybody, and descriptors keep nothing any more.
    host.ctl("reset --force");
    assert!(import(&mut taker, &descriptor).is_err());
    assert_eq!(used(&mut maker), 0);
}

#[test]
fn thousands_of_descriptors_are_cheap() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let room = usize::try_from(limit.maximum.unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
    let count = room.saturating_sub(200).min(8_000);
    let bytes = u64::try_from(count).unwrap() * 2 * MIB;

    let host = host();
    let (mut maker, mut watcher) = (attach(&host), attach(&host));
    let start = Instant::now();
    let descriptors: Vec<OwnedFd> = (0..count)
        .map(|_| {
            let id = create(&mut maker, 2 * MIB);
            maker.export(id).unwrap()
        })
        .collect();
    let each = start.elapsed() / u32::try_from(count).unwrap();
    assert!(each < Duration::from_millis(2), "{each:?} to make and export");
    drop(maker);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(used(&mut watcher), bytes, "its maker is gone");

    let start = Instant::now();
    for _ in 0..1_000 {
        used(&mut watcher);
        watcher.call(&Request::Processes(WHOLE, ProcessList::Compute)).unwrap();
    }
    let each = start.elapsed() / 2_000;
    assert!(each < Duration::from_millis(2), "{each:?} to look at it");

    drop(descriptors);
    until(&mut watcher, 0);
    assert_eq!(host.show()["kept"], json!([]));
}

#[test]
fn nothing_is_left_whenever_a_process_is_killed() {
    let host = host();
    let mut seed = 7_u64;
    for round in 0..40 {
        let path = host.path(&format!("share-{round}"));
        let path = path.display();
        let mut maker = host.workload(&format!(
            "share 64Mi at {path}; import {path}; context; import {path} map; vmm 64Mi; async 64Mi; graph 64Mi; hold"
        ));
        let mut taker = host.workload(&format!("import {path}; import {path} map; keep {path}; hold"));
        // At any moment of their short lives.
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_micros(seed >> 49));
        maker.kill();
        std::thread::sleep(Duration::from_micros((seed >> 33) & 0x1fff));
        taker.kill();
    }
    host.await_used(0, 0);
    let state = host.show();
    assert_eq!(state["kept"], json!([]));
    assert_eq!(state["holders"], json!([]));
}

#[test]
fn an_allocation_is_opened_by_another_process_and_not_by_its_own() {
    let host = host();
    let path = host.path("offer");
    let mut owner = host.workload(&format!("offer 1Gi at {}; hold", path.display()));
    owner.await_line("result op=offer bytes=1073741824 code=0");
    let other = host.workload(&format!("open {}; touch; hold", path.display()));
    other.await_line("result op=open bytes=1073741824 code=0");
    host.await_used(0, GIB + 2 * CONTEXT);
    let mut charged = host.charged(0);
    charged.sort_unstable();
    let mut expected = [(owner.pid(), SERVER), (other.pid(), CONTEXT)];
    expected.sort_unstable();
    assert_eq!(charged, expected);
    owner.kill();
    host.await_that("the memory lives on", || host.charged(0) == [(other.pid(), SERVER)]);

    let path = host.path("own");
    let mut own = host.workload(&format!("offer 1Gi at {path}; open {path}", path = path.display()));
    own.await_line("cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_CONTEXT (201)");
    assert_eq!(own.exit_code(), Some(1));
}

#[test]
fn what_gives_a_process_away_is_open_and_mapped() {
    let host = Host::start(&json!({ "devices": [{ "count": 2 }] }));
    let thief = host.workload_with("create 1Gi; hold", &[("CUDA_VISIBLE_DEVICES", "1")]);
    thief.await_line("took 1.0 GiB");
    assert_eq!(host.charged(1), []);
    let files = std::fs::read_dir(format!("/proc/{}/fd", thief.pid())).unwrap();
    let files: Vec<_> = files.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok()).collect();
    for name in ["nvidiactl", "nvidia-uvm", "nvidia1"] {
        assert!(files.contains(&host.path("dev").join(name)), "{name}: {files:?}");
    }
    assert!(!files.contains(&host.path("dev/nvidia0")), "{files:?}");

    let mapped = |pid: u32| {
        let mut text = String::new();
        std::fs::File::open(format!("/proc/{pid}/maps")).unwrap().read_to_string(&mut text).unwrap();
        let lines = text.lines().filter(|line| line.ends_with("dev/nvidia-uvm"));
        let sizes = lines.map(|line| {
            let (range, _) = line.split_once(' ').unwrap();
            let (start, end) = range.split_once('-').unwrap();
            u64::from_str_radix(end, 16).unwrap() - u64::from_str_radix(start, 16).unwrap()
        });
        sizes.sum::<u64>()
    };
    assert_eq!(mapped(thief.pid()), 0);
    let manager = host.workload("managed 4Gi; hold");
    manager.await_line("took 4.0 GiB");
    assert_eq!(mapped(manager.pid()), 4 * GIB + 2 * MIB, "its own, and what the driver maps");
    let manager = host.workload("managed 4Gi; free; hold");
    manager.await_line("gave back");
    assert_eq!(mapped(manager.pid()), 2 * MIB);
}
