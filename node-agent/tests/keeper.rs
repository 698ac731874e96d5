//! The keeper's own program against the simulated driver: what it holds, who may end when, and
//! what the kubelet sees. The driver counts; the keeper's word alone proves nothing.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by these, and the exemption for tests does not reach their helpers"
)]

#[path = "../src/keeper_protocol/mod.rs"]
mod keeper_protocol;

#[allow(dead_code, reason = "the other tests of the keeper use the rest")]
mod node;

use std::{
    fs::{self, File},
    io::{Read, Seek, Write},
    os::fd::AsFd,
    time::{Duration, Instant},
};

use keeper_protocol::{
    Answer, Ask, End, FrameError, Keeper, KeeperError, Outcome, Phase, Reason, Reply, Request, Role, Socket,
    VERSION,
};
use kubelet_api::{
    connect_unix,
    csi::{
        EPHEMERAL, GetPluginInfoRequest, NodeGetInfoRequest, NodePublishVolumeRequest,
        NodeUnpublishVolumeRequest, POD_NAME, POD_NAMESPACE, POD_UID, VolumeCapability,
        identity_client::IdentityClient,
        node_client::NodeClient,
        volume_capability::{AccessType, MountVolume},
    },
    pluginregistration::{InfoRequest, registration_client::RegistrationClient},
};
use node::{GIB, MIB, Node, eventually};
use rustix::fs::{MemfdFlags, memfd_create};
use tokio::time::{sleep, timeout};

const UID: &str = "6b0f3c52-66f2-4a52-9f0e-0c1d2e3f4a5b";

#[tokio::test]
async fn what_is_reserved_is_held_and_what_is_released_is_free() {
    let (node, _keeper, agent) = Node::start().opened().await;
    let idle = node.free();

    let wanted = 11 * GIB + 130 * MIB + 1;
    let reserved = agent.reserve(&node.uuid, wanted, GIB).await.unwrap();
    assert_eq!((reserved.bytes, reserved.end), (11 * GIB + 130 * MIB, End::Complete), "{reserved:?}");
    node.assert_kept(reserved.bytes).await;
    assert_eq!(node.free() + reserved.bytes, idle);
    let status = agent.status().await.unwrap();
    let device = status.device(&node.uuid).unwrap();
    assert_eq!(device.ballast_bytes, reserved.bytes);
    assert_eq!(device.chunks.iter().map(|(size, count)| size * count * MIB).sum::<u64>(), reserved.bytes);
    assert!(device.worker.is_some() && !device.busy);

    // Exact to 2 MiB, by the small chunks at the edge.
    let mut held = reserved.bytes;
    for wanted in [2 * MIB, 66 * MIB, 3 * GIB, GIB + 2 * MIB, MIB] {
        let released = agent.release(&node.uuid, wanted, None).await.unwrap();
        held -= released.bytes;
        assert!(released.bytes >= wanted && released.bytes < wanted + 128 * MIB, "{wanted}: {released:?}");
        assert_eq!(released.ballast_bytes, held);
        node.assert_kept(held).await;
    }
    let all = agent.release(&node.uuid, u64::MAX, None).await.unwrap();
    assert_eq!((all.bytes, all.ballast_bytes), (held, 0));
    node.assert_kept(0).await;
    let nothing = agent.release(&node.uuid, GIB, None).await.unwrap();
    assert_eq!((nothing.bytes, nothing.ballast_bytes), (0, 0));
    let unknown = agent.release("GPU-0", GIB, None).await.unwrap();
    assert_eq!(unknown.bytes, 0);
}

#[tokio::test]
async fn an_excess_is_taken_back() {
    let (node, _keeper, agent) = Node::start().opened().await;
    agent.reserve(&node.uuid, GIB + 128 * MIB, GIB).await.unwrap();
    agent.release(&node.uuid, 128 * MIB, None).await.unwrap();
    // What is left has no smaller chunks than 128 MiB, or runs out of them soon.
    let mut held = GIB;
    for _ in 0..7 {
        let released = agent.release(&node.uuid, 130 * MIB, Some(GIB)).await.unwrap();
        assert!(released.bytes >= 130 * MIB, "{released:?}");
        held -= 130 * MIB;
        node.assert_kept(held).await;
    }
}

#[tokio::test]
async fn what_is_to_stay_free_stays_free() {
    let (node, _keeper, agent) = Node::start().opened().await;
    let keep = 3 * GIB + 50 * MIB;
    let reserved = agent.reserve(&node.uuid, 1 << 50, keep).await.unwrap();
    assert_eq!(reserved.end, End::KeepFree, "{reserved:?}");
    node.assert_kept(reserved.bytes).await;
    let free = node.free();
    assert!((keep..keep + 2 * MIB).contains(&free), "{free} of {keep}");
    assert_eq!(reserved.free_bytes, Some(free));
    let more = agent.reserve(&node.uuid, GIB, keep).await.unwrap();
    assert_eq!((more.bytes, more.end), (0, End::KeepFree));
}

#[tokio::test]
async fn each_instance_of_a_gpu_has_its_own_ballast() {
    let (node, _keeper, agent) = Node::start().opened().await;
    for uuid in &node.instances {
        let reserved = agent.reserve(uuid, GIB, GIB).await.unwrap();
        assert_eq!((reserved.bytes, reserved.end), (GIB, End::Complete), "{uuid}: {reserved:?}");
    }
    node.assert_kept(2 * GIB).await;
    let unknown = "GPU-00000000-0000-0000-0000-000000000000";
    let reserved = agent.reserve(unknown, GIB, 0).await.unwrap();
    assert_eq!((reserved.bytes, reserved.end), (0, End::Failed));
    assert!(reserved.message.unwrap().contains(unknown));
    let status = agent.status().await.unwrap();
    assert!(status.device(unknown).unwrap().last_error.is_some());
    let nonsense = agent.reserve("0", GIB, 0).await.unwrap_err();
    assert_eq!(nonsense.reason(), Some(Reason::Malformed));
}

#[tokio::test]
async fn a_dead_worker_takes_nothing_with_it() {
    let (node, _keeper, agent) = Node::start().opened().await;
    agent.warm(&node.uuid).await.unwrap();
    let mut held = 0;
    for round in 0..20_u64 {
        let worker = agent.status().await.unwrap().device(&node.uuid).unwrap().worker.unwrap();
        let reserve = agent.reserve(&node.uuid, 100 * GIB, GIB);
        let kill = async {
            sleep(Duration::from_micros(round * 400)).await;
            node::kill(worker);
        };
        let (reserved, ()) = tokio::join!(reserve, kill);
        let reserved = reserved.unwrap();
        held += reserved.bytes;
        assert!(matches!(reserved.end, End::Complete | End::Failed), "{reserved:?}");
        assert_eq!(reserved.ballast_bytes, held);
        node.assert_kept(held).await;
        held -= agent.release(&node.uuid, u64::MAX, None).await.unwrap().bytes;
        assert_eq!(held, 0);
        // It is started again when it is needed.
        eventually("a worker", async || agent.warm(&node.uuid).await.is_ok_and(|w| w.end == End::Complete))
            .await;
    }
}

#[tokio::test]
async fn a_release_comes_before_a_reservation_under_way() {
    let (node, _keeper, agent) = Node::start().opened().await;
    agent.reserve(&node.uuid, 10 * GIB, GIB).await.unwrap();
    node.slow(10);
    let reserve = agent.reserve(&node.uuid, 100 * GIB, GIB);
    let release = async {
        sleep(Duration::from_millis(50)).await;
        let busy = agent.reserve(&node.uuid, GIB, GIB).await.unwrap_err();
        assert_eq!(busy.reason(), Some(Reason::Busy));
        agent.release(&node.uuid, 4 * GIB, None).await.unwrap()
    };
    let (reserved, released) = tokio::join!(reserve, release);
    let reserved = reserved.unwrap();
    assert_eq!(reserved.end, End::Interrupted, "{reserved:?}");
    assert!(reserved.bytes < 100 * GIB && released.bytes == 4 * GIB);
    node.assert_kept(6 * GIB + reserved.bytes).await;
}

#[tokio::test]
async fn chunks_are_put_in_order_without_a_byte_let_go() {
    let (node, _keeper, agent) = Node::start().opened().await;
    let mut held = agent.reserve(&node.uuid, 20 * GIB, GIB).await.unwrap().bytes;
    let count = async |size| {
        let status = agent.status().await.unwrap();
        status.device(&node.uuid).unwrap().chunks.get(&size).copied().unwrap_or(0)
    };
    let (deep, edge) = (count(1024).await, count(128).await);
    for _ in 0..edge {
        held -= agent.release(&node.uuid, 128 * MIB, None).await.unwrap().bytes;
    }
    node.assert_kept(held).await;
    assert_eq!(count(128).await, 0);
    let lowest = node.watch_lowest();
    eventually("small chunks again", async || count(128).await > 0 && count(1024).await < deep).await;
    node.assert_kept(held).await;
    assert!(lowest.end() >= held);
}

#[tokio::test]
async fn a_worker_that_is_kept_awake_takes_nothing_that_is_to_stay_free() {
    let (node, _keeper, agent) = Node::start().opened().await;
    let keep_free = node.free() - 20 * GIB;
    let mut held = agent.reserve(&node.uuid, 20 * GIB, keep_free).await.unwrap().bytes;
    let edge = agent.status().await.unwrap().device(&node.uuid).unwrap().chunks[&128];
    for _ in 0..edge {
        held -= agent.release(&node.uuid, 128 * MIB, None).await.unwrap().bytes;
    }
    agent.warm(&node.uuid).await.unwrap();
    // Long enough for the chunks to be put in order, for which there is no room.
    sleep(Duration::from_secs(8)).await;
    node.assert_kept(held).await;
    let status = agent.status().await.unwrap();
    assert_eq!(status.device(&node.uuid).unwrap().chunks.get(&128), None);
}

#[tokio::test]
async fn a_reservation_does_not_have_to_wait_for_a_worker_to_be_asked_for_again() {
    let (node, _keeper, agent) = Node::start().opened().await;
    node.slow(100);
    let reserve = async {
        sleep(Duration::from_millis(20)).await;
        assert_eq!(agent.warm(&node.uuid).await.unwrap().end, End::Complete, "it is being started");
        agent.reserve(&node.uuid, 256 * MIB, GIB).await.unwrap()
    };
    let (warmed, reserved) = tokio::join!(agent.warm(&node.uuid), reserve);
    assert_eq!((warmed.unwrap().bytes, reserved.bytes, reserved.end), (0, 256 * MIB, End::Complete));
}

#[tokio::test]
async fn standing_down_closes_everything_soon_and_holds_nothing_until_off() {
    let (node, _keeper, agent) = Node::start().opened().await;
    agent.reserve(&node.uuid, 50 * GIB, GIB).await.unwrap();
    node.slow(5);
    let started = Instant::now();
    let reserve = agent.reserve(&node.uuid, 50 * GIB, GIB);
    let stand_down = async {
        sleep(Duration::from_millis(30)).await;
        agent.stand_down(true).await.unwrap();
    };
    let (reserved, ()) = tokio::join!(reserve, stand_down);
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(reserved.unwrap().end, End::Interrupted);
    node.assert_kept(0).await;
    let status = agent.status().await.unwrap();
    assert!(status.stand_down && status.device(&node.uuid).unwrap().worker.is_none());
    eventually("device that no process has open", async || node.holders() == 0).await;
    let refused = agent.reserve(&node.uuid, GIB, 0).await.unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::StoodDown));
    // A new keeper stands down as well.
    let successor = node.keeper().await;
    let agent = successor.connect().await;
    assert!(agent.status().await.unwrap().stand_down);
    agent.stand_down(false).await.unwrap();
    node.fast();
    assert_eq!(agent.reserve(&node.uuid, GIB, 0).await.unwrap().end, End::Complete);
}

#[tokio::test]
async fn a_new_keeper_is_handed_everything_and_the_old_one_stands_by() {
    let node = Node::start();
    let mut first = node.keeper().await;
    let agent = first.connect().await;
    agent.reserve(&node.uuid, 100 * GIB, GIB).await.unwrap();
    let mut page = page(b"quota of a pod");
    agent.put("pod/quota", &[page.as_fd(), page.as_fd()]).await.unwrap();
    let before = agent.status().await.unwrap().device(&node.uuid).unwrap().chunks.clone();

    let lowest = node.watch_lowest();
    let second = node.keeper().await;
    timeout(Duration::from_secs(5), agent.closed()).await.expect("the old keeper lets its agent go");
    assert!(lowest.end() >= 100 * GIB, "held at every moment");
    let agent = second.connect().await;
    let status = agent.status().await.unwrap();
    assert_eq!(status.device(&node.uuid).unwrap().chunks, before);
    assert!(!status.predecessor, "{status:?}");
    let [stored, _] = <[_; 2]>::try_from(agent.get("pod/quota").await.unwrap()).unwrap();
    let mut text = String::new();
    page.rewind().unwrap();
    File::from(stored).read_to_string(&mut text).unwrap();
    assert_eq!(text, "quota of a pod");

    // The old one is alive and holds nothing: what is released is free.
    assert!(first.is_alive());
    let released = agent.release(&node.uuid, 20 * GIB, None).await.unwrap();
    node.assert_kept(100 * GIB - released.bytes).await;
    first.kill();
    assert_eq!(agent.status().await.unwrap().device(&node.uuid).unwrap().ballast_bytes, 80 * GIB);
    node.assert_kept(80 * GIB).await;
}

#[tokio::test]
async fn a_keeper_that_ends_hands_back_and_one_that_dies_is_followed() {
    let node = Node::start();
    let mut first = node.keeper().await;
    first.connect().await.reserve(&node.uuid, 10 * GIB, GIB).await.unwrap();
    let mut second = node.keeper().await;
    let agent = second.connect().await;
    eventually("keeper that stands by", async || agent.status().await.unwrap().standing_by == 1).await;
    let lowest = node.watch_lowest();
    second.terminate();
    assert!(second.wait().success());
    assert!(lowest.end() >= 10 * GIB, "handed back");
    let agent = first.connect().await;
    assert_eq!(agent.status().await.unwrap().device(&node.uuid).unwrap().ballast_bytes, 10 * GIB);

    let mut third = node.keeper().await;
    node.assert_kept(10 * GIB).await;
    third.kill();
    node.assert_kept(0).await;
    let agent = first.connect().await;
    assert_eq!(agent.status().await.unwrap().devices, []);
    assert_eq!(agent.reserve(&node.uuid, GIB, 0).await.unwrap().end, End::Complete);
    // Nobody stands by: it frees what it holds and ends.
    first.terminate();
    assert!(first.wait().success());
    node.assert_kept(0).await;
}

/// Whichever of the two dies, and when: while one lives, it holds what it had, and what is held
/// is what it says.
#[tokio::test]
async fn a_death_in_the_middle_of_a_hand_over_loses_nothing_that_a_living_keeper_had() {
    let node = Node::start();
    let mut holder = node.keeper().await;
    // Small chunks, so that there is a middle.
    let agent = holder.connect().await;
    agent.reserve(&node.uuid, 120 * GIB, GIB).await.unwrap();
    for number in 0..300 {
        let page = page(b"p");
        agent.put(&format!("pod-{number}"), &[page.as_fd()]).await.unwrap();
    }
    // How often the survivor had all, some or nothing of it.
    let (mut all, mut some, mut nothing) = (0, 0, 0);
    for round in 0..40_u64 {
        let mut successor = node.spawn_keeper();
        sleep(Duration::from_micros(3_000 + round * 1_000)).await;
        if round % 2 == 0 {
            successor.kill();
            let agent = holder.connect().await;
            // It may have taken over just before it died; then all it had is gone with it.
            let status = agent.status().await.unwrap();
            let held = status.device(&node.uuid).map_or(0, |device| device.ballast_bytes);
            node.assert_kept(held).await;
            if held == 0 {
                nothing += 1;
                refill(&node, &agent).await;
            } else {
                all += 1;
                assert_eq!((held, status.stored), (120 * GIB, 300), "round {round}");
            }
        } else {
            holder.kill();
            let agent = successor.connect().await;
            let status = agent.status().await.unwrap();
            let held = status.device(&node.uuid).map_or(0, |device| device.ballast_bytes);
            node.assert_kept(held).await;
            match (held, status.stored) {
                (bytes, 300) if bytes == 120 * GIB => all += 1,
                (0, 0) => nothing += 1,
                _ => some += 1,
            }
            refill(&node, &agent).await;
            holder = successor;
        }
    }
    println!("all {all}, some {some}, nothing {nothing}");
    assert!(holder.is_alive());
}

/// Holds again what a hand-over that was cut short may have lost with the dead.
async fn refill(node: &Node, agent: &Keeper) {
    let status = agent.status().await.unwrap();
    let held = status.device(&node.uuid).map_or(0, |device| device.ballast_bytes);
    let reserved = agent.reserve(&node.uuid, 120 * GIB - held, GIB).await.unwrap();
    assert_eq!((reserved.ballast_bytes, reserved.end), (120 * GIB, End::Complete));
    for number in 0..300 {
        let page = page(b"p");
        agent.put(&format!("pod-{number}"), &[page.as_fd()]).await.unwrap();
    }
}

#[tokio::test]
async fn garbage_and_floods_harm_nobody() {
    let (node, keeper, agent) = Node::start().opened().await;
    agent.reserve(&node.uuid, 5 * GIB, GIB).await.unwrap();
    let path = node.socket();

    // Not a hello, not a request, too long, too many descriptors, no frame at all.
    let null = File::open("/dev/null").unwrap();
    for text in
        ["", "{", "null", "[]", r#"{"hello":{"version":99}}"#, r#"{"status":{}}"#, &"x".repeat(100 << 10)]
    {
        let socket = std::os::unix::net::UnixStream::from(node::connect(&path));
        let _ = (&socket).write(text.as_bytes());
        socket.set_read_timeout(Some(Duration::from_secs(7))).unwrap();
        let mut answer = vec![0; 4096];
        let length = (&socket).read(&mut answer).unwrap();
        if length > 0 {
            let Reply { result, .. } = serde_json::from_slice(&answer[..length]).unwrap();
            assert!(matches!(result, Outcome::Error(_)), "{text:.40}");
        }
    }
    // A probe may not do what the agent may.
    let probe = Keeper::connect_as(&path, Role::Probe).await.unwrap();
    let refused = probe.release(&node.uuid, GIB, None).await.unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::NotAllowed));
    let socket = Socket::connect(&path).unwrap();
    socket
        .send(&Request { id: 1, ask: Ask::Hello { version: VERSION, role: Role::Probe } }, &[])
        .await
        .unwrap();
    socket.receive().await.unwrap();
    socket.send(&Request { id: 2, ask: Ask::Done {} }, &[]).await.unwrap();
    let reply: Reply = socket.receive().await.unwrap().read().unwrap();
    assert!(matches!(reply.result, Outcome::Error(_)));
    // One that floods, with descriptors, and never reads; with others that say nothing.
    let silent: Vec<_> = (0..6).map(|_| node::connect(&path)).collect();
    let flood = async {
        let descriptors = vec![null.as_fd(); 100];
        for id in 3..3_000 {
            let request = Request { id, ask: Ask::Status {} };
            if timeout(Duration::from_millis(500), socket.send(&request, &descriptors)).await.is_err() {
                break;
            }
        }
    };
    let works = async {
        for _ in 0..20 {
            let status = timeout(Duration::from_secs(2), agent.status()).await.unwrap().unwrap();
            assert_eq!(status.device(&node.uuid).unwrap().ballast_bytes, 5 * GIB);
        }
    };
    tokio::join!(flood, works);
    drop(silent);
    node.assert_kept(5 * GIB).await;
    let open = fs::read_dir(format!("/proc/{}/fd", keeper.pid())).unwrap().count();
    assert!(open < 120, "{open} descriptors");
}

#[tokio::test]
async fn the_newest_agent_counts() {
    let node = Node::start();
    let keeper = node.keeper().await;
    let old = keeper.connect().await;
    let new = keeper.connect().await;
    timeout(Duration::from_secs(5), old.closed()).await.unwrap();
    assert!(matches!(old.status().await, Err(KeeperError::Closed)));
    assert!(new.status().await.is_ok());
}

#[tokio::test]
async fn what_an_earlier_agent_asked_for_is_not_taken_behind_the_next_ones_back() {
    let node = Node::start();
    let keeper = node.keeper().await;
    let old = keeper.connect().await;
    node.slow(10);
    let reserve = {
        let (old, uuid) = (old.clone(), node.uuid.clone());
        tokio::spawn(async move { old.reserve(&uuid, 100 * GIB, GIB).await.map(drop) })
    };
    let held = async |agent: &Keeper| {
        let status = agent.status().await.unwrap();
        status.device(&node.uuid).map_or((false, 0), |device| (device.busy, device.ballast_bytes))
    };
    eventually("a reservation under way", async || held(&old).await.1 > 0).await;
    let new = keeper.connect().await;
    assert!(matches!(reserve.await.unwrap(), Err(KeeperError::Closed)));
    eventually("an end of it", async || !held(&new).await.0).await;
    let (_, bytes) = held(&new).await;
    assert!(bytes < 100 * GIB, "{bytes}");
    node.fast();
    assert_eq!(new.reserve(&node.uuid, GIB, GIB).await.unwrap().ballast_bytes, bytes + GIB);
}

#[tokio::test]
async fn what_is_held_outlives_the_agent() {
    let (node, keeper, agent) = Node::start().opened().await;
    agent.reserve(&node.uuid, 5 * GIB, GIB).await.unwrap();
    drop(agent);
    sleep(Duration::from_millis(100)).await;
    node.assert_kept(5 * GIB).await;
    let status = keeper.connect().await.status().await.unwrap();
    assert_eq!(status.device(&node.uuid).unwrap().ballast_bytes, 5 * GIB);
}

#[tokio::test]
async fn stored_descriptors_come_back_under_their_keys() {
    let (_node, _keeper, agent) = Node::start().opened().await;
    assert_eq!(agent.get("none").await.unwrap_err().reason(), Some(Reason::NotFound));
    let file = page(b"x");
    for bad in ["", "a b", &"k".repeat(200)] {
        assert_eq!(agent.put(bad, &[file.as_fd()]).await.unwrap_err().reason(), Some(Reason::Malformed));
    }
    assert_eq!(agent.put("k", &[]).await.unwrap_err().reason(), Some(Reason::Malformed));
    for number in 0..600 {
        agent.put(&format!("key-{number:03}"), &[file.as_fd(), file.as_fd()]).await.unwrap();
    }
    let keys = agent.keys().await.unwrap();
    assert_eq!((keys.len(), keys[0].as_str(), keys[599].as_str()), (600, "key-000", "key-599"));
    assert_eq!(agent.get("key-007").await.unwrap().len(), 2);
    agent.put("key-007", &[file.as_fd()]).await.unwrap();
    assert_eq!(agent.get("key-007").await.unwrap().len(), 1);
    agent.forget("key-007").await.unwrap();
    agent.forget("key-007").await.unwrap();
    assert_eq!(agent.get("key-007").await.unwrap_err().reason(), Some(Reason::NotFound));
    assert_eq!(agent.status().await.unwrap().stored, 599);
}

#[tokio::test]
async fn a_path_that_was_removed_is_made_again() {
    let (node, keeper, agent) = Node::start().opened().await;
    agent.reserve(&node.uuid, GIB, 0).await.unwrap();
    fs::remove_file(node.socket()).unwrap();
    eventually("the socket", async || Keeper::connect(&node.socket()).await.is_ok()).await;
    let status = keeper.connect().await.status().await.unwrap();
    assert_eq!(status.device(&node.uuid).unwrap().ballast_bytes, GIB);
}

#[tokio::test]
async fn a_probe_tells_what_the_keeper_of_this_container_is_at() {
    let node = Node::start();
    let absent = node.probe();
    assert!(!absent.status.success());
    let keeper = node.keeper().await;
    eventually("a healthy keeper", async || node.probe().status.success()).await;
    let status: keeper_protocol::Status = serde_json::from_slice(&node.probe().stdout).unwrap();
    assert_eq!(status.phase, Phase::Holding);
    // In this mount namespace the first keeper goes on answering.
    let _second = node.keeper().await;
    eventually("standing by", async || {
        let probe = node.probe();
        let status = serde_json::from_slice::<keeper_protocol::Status>(&probe.stdout);
        probe.status.success() && status.is_ok_and(|status| status.phase == Phase::StandingBy)
    })
    .await;
    drop(keeper);
}

#[tokio::test]
async fn a_malformed_frame_after_hello_ends_that_connection_alone() {
    let (node, _keeper, agent) = Node::start().opened().await;
    let socket = Socket::connect(&node.socket()).unwrap();
    socket
        .send(&Request { id: 1, ask: Ask::Hello { version: VERSION, role: Role::Probe } }, &[])
        .await
        .unwrap();
    let reply: Reply = socket.receive().await.unwrap().read().unwrap();
    assert_eq!(reply, Reply { id: 1, result: Outcome::Ok(Answer::Done {}) });
    socket.send(&"nonsense", &[]).await.unwrap();
    let reply: Reply = socket.receive().await.unwrap().read().unwrap();
    assert!(matches!(reply.result, Outcome::Error(refusal) if refusal.reason == Reason::Malformed));
    assert!(matches!(socket.receive().await, Err(FrameError::Closed)));
    assert!(agent.status().await.is_ok());
}

fn publish(node: &Node) -> NodePublishVolumeRequest {
    let context = [(EPHEMERAL, "true"), (POD_UID, UID), (POD_NAME, "server"), (POD_NAMESPACE, "llm")];
    NodePublishVolumeRequest {
        volume_id: "csi-1".into(),
        target_path: node.volume(UID).join("mount").to_str().unwrap().into(),
        readonly: true,
        volume_capability: Some(VolumeCapability {
            access_type: Some(AccessType::Mount(MountVolume::default())),
            access_mode: None,
        }),
        volume_context: context.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
        ..NodePublishVolumeRequest::default()
    }
}

#[tokio::test]
async fn the_kubelet_finds_the_driver_and_gets_its_volumes_across_a_hand_over() {
    let node = Node::start();
    let mut first = node.keeper_with_volumes(b"\x7fELF guard one").await;
    let registry = connect_unix(node.registration()).await.unwrap();
    let info = RegistrationClient::new(registry).get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", "guard.highwater.dev"));
    assert_eq!(info.supported_versions, ["1.0.0"]);
    let channel = connect_unix(&info.endpoint).await.unwrap();
    let plugin = IdentityClient::new(channel.clone()).get_plugin_info(GetPluginInfoRequest {}).await.unwrap();
    assert_eq!(plugin.into_inner().name, "guard.highwater.dev");
    let mut driver = NodeClient::new(channel);
    assert_eq!(driver.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner().node_id, "node-1");

    let target = node.volume(UID).join("mount");
    fs::create_dir_all(node.volume(UID)).unwrap();
    driver.node_publish_volume(publish(&node)).await.unwrap();
    assert_eq!(fs::read(target.join("libhighwater-guard.so")).unwrap(), b"\x7fELF guard one");
    let writable = NodePublishVolumeRequest { readonly: false, ..publish(&node) };
    let refused = driver.node_publish_volume(writable).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);

    let _second = node.keeper_with_volumes(b"\x7fELF guard two").await;
    first.kill();
    let mut driver = NodeClient::new(connect_unix(&info.endpoint).await.unwrap());
    driver.node_publish_volume(publish(&node)).await.unwrap();
    assert_eq!(
        fs::read(target.join("libhighwater-guard.so")).unwrap(),
        b"\x7fELF guard one",
        "a running pod's own"
    );
    let unpublish =
        NodeUnpublishVolumeRequest { volume_id: "csi-1".into(), target_path: publish(&node).target_path };
    driver.node_unpublish_volume(unpublish.clone()).await.unwrap();
    driver.node_unpublish_volume(unpublish).await.unwrap();
    assert!(!target.exists());
    driver.node_publish_volume(publish(&node)).await.unwrap();
    assert_eq!(fs::read(target.join("libhighwater-guard.so")).unwrap(), b"\x7fELF guard two");
}

#[tokio::test]
async fn a_full_disk_is_told_and_leaves_nothing_behind() {
    let node = Node::start();
    fs::create_dir_all(node.volume(UID)).unwrap();
    // The pods' directory on a disk of 64 KiB, in a mount namespace of the keeper's own.
    let Some(keeper) =
        node.keeper_on_small_disk(&[b"\x7fELF".to_vec(), vec![1; 1 << 20]].concat(), UID).await
    else {
        return;
    };
    let endpoint = node.kubelet_root().join("plugins/guard.highwater.dev/csi.sock");
    let mut driver = NodeClient::new(connect_unix(endpoint).await.unwrap());
    for _ in 0..2 {
        let refused = driver.node_publish_volume(publish(&node)).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused}");
        assert!(refused.message().contains("full"), "{refused}");
        let seen = format!("/proc/{}/root{}", keeper.pid(), node.volume(UID).display());
        assert_eq!(fs::read_dir(seen).unwrap().count(), 0);
    }
}

#[tokio::test]
async fn a_keeper_is_small() {
    let node = Node::start();
    let keeper = node.keeper_with_volumes(b"guard").await;
    let agent = keeper.connect().await;
    agent.reserve(&node.uuid, 120 * GIB, GIB).await.unwrap();
    agent.reserve(&node.uuid, 0, GIB).await.unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", keeper.pid())).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap().trim();
    let kibibytes: u64 = resident.trim_end_matches(" kB").parse().unwrap();
    println!("resident: {kibibytes} KiB");
    // What is built for tests is larger than what is shipped.
    assert!(kibibytes < 24 << 10, "{kibibytes} KiB");
    let maps = fs::read_to_string(format!("/proc/{}/maps", keeper.pid())).unwrap();
    assert!(!maps.contains("gpusim"), "the keeper itself loads no driver");
}

fn page(text: &[u8]) -> File {
    let mut page = File::from(memfd_create("page", MemfdFlags::CLOEXEC).unwrap());
    page.write_all(text).unwrap();
    page.rewind().unwrap();
    page
}
