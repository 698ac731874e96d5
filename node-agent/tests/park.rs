//! What the keeper parks, against the simulated driver: this very process is the one whose memory
//! is moved, and nobody's death leaves it on the host. The driver counts; the keeper's word alone
//! proves nothing.
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

use std::{fs, time::Duration};

use gpusim::{fault::FaultKind, protocol::CheckpointStep};
use keeper_protocol::{Keeper, ParkAsk, ParkState, Process, Reason, Role};
use node::{GIB, KeeperProcess, Node, eventually, kill};
use tokio::time::{Instant, sleep};

const POD: &str = "6b0f3c52-66f2-4a52-9f0e-0c1d2e3f4a5b";

/// A host on which a step takes a quarter of a second, so that it can be cut off in the middle.
const SLOW: &str = r#"{"contextOverhead": 0, "openOverhead": 0, "context": 0, "teardownMicrosecondsPerGibibyte": 0,
    "checkpointMillisecondsPerGibibyte": 60, "restoreMillisecondsPerGibibyte": 60,
    "devices": [{}, {"mig": [{"profile": "1g.18gb", "memory": "16Gi", "gpuInstance": 7}]}]}"#;
const BYTES: u64 = 4 * GIB;

fn own() -> Process {
    let pid = i32::try_from(std::process::id()).unwrap();
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let started = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
    Process { pid, started }
}

fn ask(node: &Node) -> ParkAsk {
    ParkAsk {
        pod: POD.into(),
        device: node.uuid.clone(),
        processes: vec![own()],
        bytes: BYTES,
        lock_milliseconds: 1000,
    }
}

async fn state(keeper: &Keeper, node: &Node) -> Option<ParkState> {
    let parking = keeper.status().await.unwrap().parking.unwrap();
    parking.find(POD, &node.uuid).map(|park| park.state)
}

/// The children of a keeper that move memory.
fn movers(keeper: &KeeperProcess) -> Vec<u32> {
    let pid = keeper.pid();
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = text.split_whitespace().map(|pid| pid.parse().unwrap());
    let moves = |pid: &u32| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.windows(5).any(|w| w == b"mover"))
    };
    children.filter(moves).collect()
}

/// Brings the pod back by whatever keeper there is, and sees to it that it is whole.
async fn bring_back(keeper: &Keeper, node: &Node, free: u64) {
    eventually("end of what is under way", async || {
        !matches!(state(keeper, node).await, Some(ParkState::Parking | ParkState::Restoring))
    })
    .await;
    let moved = keeper.restore(POD, &node.uuid).await.unwrap();
    assert_eq!(moved.state, ParkState::Running, "{moved:?}");
    assert_eq!(state(keeper, node).await, None);
    assert_eq!(node.free(), free);
}

#[tokio::test]
async fn a_pod_goes_to_the_host_and_comes_back() {
    let (node, _keeper, agent) = Node::start().opened().await;
    let idle = node.free();
    let _gpu = node.use_gpu(BYTES);
    assert_eq!(agent.status().await.unwrap().parking, Some(keeper_protocol::Parking::default()));
    let moved = agent.park(ask(&node)).await.unwrap();
    assert_eq!((moved.state, moved.message), (ParkState::Parked, None));
    assert_eq!(node.free(), idle);
    let parking = agent.status().await.unwrap().parking.unwrap();
    let park = parking.find(POD, &node.uuid).unwrap();
    assert_eq!((park.state, park.bytes), (ParkState::Parked, BYTES));
    assert!(park.since > 1_700_000_000_000);
    assert_eq!(agent.park(ask(&node)).await.unwrap_err().reason(), Some(Reason::Busy));
    bring_back(&agent, &node, idle - BYTES).await;
    bring_back(&agent, &node, idle - BYTES).await;
}

#[tokio::test]
async fn what_cannot_be_parked_stays_as_it_is_and_the_reason_is_told() {
    let (node, _keeper, agent) = Node::start().opened().await;
    // A process that does not use the device at all.
    let moved = agent.park(ask(&node)).await.unwrap();
    assert_eq!(moved.state, ParkState::Running);
    assert!(moved.message.unwrap().contains("GetState"));
    let _gpu = node.use_gpu(BYTES);
    let free = node.free();
    for step in [CheckpointStep::Lock, CheckpointStep::Checkpoint] {
        node.inject(FaultKind::Checkpoint { step, loses: false });
        let moved = agent.park(ask(&node)).await.unwrap();
        assert!(moved.state == ParkState::Running && moved.message.is_some(), "{moved:?}");
        assert_eq!((node.free(), state(&agent, &node).await), (free, None));
        node.fast();
    }
    let other = Process { started: own().started + 1, ..own() };
    let error = agent.park(ParkAsk { processes: vec![other], ..ask(&node) }).await.unwrap_err();
    assert_eq!(error.reason(), Some(Reason::NotFound));
    assert_eq!(agent.park(ask(&node)).await.unwrap().state, ParkState::Parked, "nothing was left behind");
    bring_back(&agent, &node, free).await;
}

#[tokio::test]
async fn without_room_it_stays_parked_and_a_lost_process_is_told() {
    let (node, _keeper, agent) = Node::start().opened().await;
    let gpu = node.use_gpu(BYTES);
    assert_eq!(agent.park(ask(&node)).await.unwrap().state, ParkState::Parked);
    let idle = node.free();
    agent.reserve(&node.uuid, 1 << 50, GIB).await.unwrap();
    let moved = agent.restore(POD, &node.uuid).await.unwrap();
    assert_eq!(moved.state, ParkState::Parked);
    assert!(moved.message.unwrap().contains("OUT_OF_MEMORY"));
    assert_eq!(state(&agent, &node).await, Some(ParkState::Parked));
    agent.release(&node.uuid, u64::MAX, None).await.unwrap();
    node.assert_kept(0).await;
    bring_back(&agent, &node, idle - BYTES).await;

    assert_eq!(agent.park(ask(&node)).await.unwrap().state, ParkState::Parked);
    node.inject(FaultKind::Checkpoint { step: CheckpointStep::Restore, loses: true });
    let moved = agent.restore(POD, &node.uuid).await.unwrap();
    assert_eq!(moved.state, ParkState::Lost, "{moved:?}");
    assert_eq!(state(&agent, &node).await, Some(ParkState::Lost));
    assert_eq!(agent.restore(POD, &node.uuid).await.unwrap().state, ParkState::Lost);
    assert_eq!(node.free(), idle, "nothing of it is on the device");
    drop(gpu);
}

#[tokio::test]
async fn a_worker_that_is_killed_anywhere_leaves_nothing_parked() {
    let (node, keeper, agent) = Node::start_as(SLOW).opened().await;
    let idle = node.free();
    let _gpu = node.use_gpu(BYTES);
    for round in 0..8_u64 {
        let (agent, asked) = (agent.clone(), ask(&node));
        let parked = tokio::spawn({
            let agent = agent.clone();
            async move { agent.park(asked).await.unwrap() }
        });
        eventually("worker", async || !movers(&keeper).is_empty()).await;
        sleep(Duration::from_millis(60 * round)).await;
        movers(&keeper).into_iter().for_each(kill);
        let moved = parked.await.unwrap();
        let on_host = moved.state == ParkState::Parked;
        assert!(on_host || moved.state == ParkState::Running, "{round}: {moved:?}");
        assert_eq!(node.free(), if on_host { idle } else { idle - BYTES }, "{round}: {moved:?}");
        bring_back(&agent, &node, idle - BYTES).await;
    }
}

#[tokio::test]
async fn a_keeper_that_is_killed_anywhere_leaves_nothing_parked() {
    let node = Node::start_as(SLOW);
    let idle = node.free();
    let _gpu = node.use_gpu(BYTES);
    for round in 0..10_u64 {
        let mut first = node.keeper().await;
        let agent = first.connect().await;
        // Even rounds die on the way to the host, odd ones on the way back.
        let back = round % 2 == 1;
        if back {
            assert_eq!(agent.park(ask(&node)).await.unwrap().state, ParkState::Parked);
        }
        let way = tokio::spawn({
            let (agent, asked, uuid) = (agent.clone(), ask(&node), node.uuid.clone());
            async move { if back { agent.restore(POD, &uuid).await } else { agent.park(asked).await } }
        });
        eventually("worker", async || !movers(&first).is_empty()).await;
        sleep(Duration::from_millis(60 * (round / 2))).await;
        first.kill();
        assert!(way.await.unwrap().is_err() || round > 7);
        let second = node.keeper().await;
        let agent = second.connect().await;
        bring_back(&agent, &node, idle - BYTES).await;
    }
}

#[tokio::test]
async fn a_successor_takes_the_parks_over_and_an_end_for_good_brings_them_back() {
    let node = Node::start_as(SLOW);
    let mut first = node.keeper().await;
    let agent = first.connect().await;
    let idle = node.free();
    let _gpu = node.use_gpu(BYTES);
    let parked = tokio::spawn({
        let (agent, asked) = (agent.clone(), ask(&node));
        async move { agent.park(asked).await }
    });
    eventually("worker", async || !movers(&first).is_empty()).await;
    // It waits until what is under way is done.
    let mut second = node.keeper().await;
    assert_eq!(parked.await.unwrap().unwrap().state, ParkState::Parked);
    let agent = second.connect().await;
    assert_eq!(state(&agent, &node).await, Some(ParkState::Parked));
    assert_eq!(node.free(), idle);
    first.kill();
    // Nobody stands by any more.
    second.terminate();
    assert!(second.wait().success());
    assert_eq!(node.free(), idle - BYTES);
    assert!(!second.is_alive());
}

#[tokio::test]
async fn an_end_that_nobody_takes_over_brings_back_what_is_parked() {
    let node = Node::start_as(SLOW);
    let mut first = node.keeper().await;
    let agent = first.connect().await;
    let idle = node.free();
    let _gpu = node.use_gpu(BYTES);
    assert_eq!(agent.park(ask(&node)).await.unwrap().state, ParkState::Parked);
    let mut second = node.keeper().await;
    let stands_by = async || second.connect().await.status().await.is_ok_and(|s| s.standing_by == 1);
    eventually("keeper that stands by", stands_by).await;
    // It stands by, is asked, and never answers.
    first.stop();
    second.terminate();
    assert!(second.wait().success());
    assert_eq!(node.free(), idle - BYTES);
    first.kill();
}

/// A host on which memory comes back for longer than an end may take.
const STUCK: &str = r#"{"contextOverhead": 0, "openOverhead": 0, "context": 0, "teardownMicrosecondsPerGibibyte": 0,
    "checkpointMillisecondsPerGibibyte": 1, "restoreMillisecondsPerGibibyte": 1200, "devices": [{}, {}]}"#;

#[tokio::test]
async fn an_end_is_over_in_time_and_the_next_keeper_goes_on_with_what_is_left() {
    let node = Node::start_as(STUCK);
    let mut first = node.keeper_that_ends_within(2).await;
    let agent = first.connect().await;
    let idle = node.free();
    let _gpu = node.use_gpu(BYTES);
    assert_eq!(agent.park(ask(&node)).await.unwrap().state, ParkState::Parked);
    let told = Instant::now();
    first.terminate();
    assert!(first.wait().success(), "it ends by itself, not by being killed");
    let took = told.elapsed();
    assert!(took >= Duration::from_secs(2) && took < Duration::from_secs(8), "{took:?}");
    assert_eq!(node.free(), idle, "it is not back yet");
    let second = node.keeper().await;
    let agent = second.connect().await;
    eventually("memory that is back", async || state(&agent, &node).await.is_none()).await;
    assert_eq!(node.free(), idle - BYTES);
}

#[tokio::test]
async fn an_agent_that_dies_finds_what_it_had_parked() {
    let node = Node::start_as(SLOW);
    let keeper = node.keeper().await;
    let idle = node.free();
    let _gpu = node.use_gpu(BYTES);
    let agent = keeper.connect().await;
    let asked = ask(&node);
    let dead = tokio::spawn(async move { agent.park(asked).await });
    eventually("worker", async || !movers(&keeper).is_empty()).await;
    dead.abort();
    let agent = keeper.connect().await;
    let began = Instant::now();
    eventually("park", async || state(&agent, &node).await == Some(ParkState::Parked)).await;
    assert!(began.elapsed() < Duration::from_secs(10));
    assert_eq!(node.free(), idle);
    bring_back(&agent, &node, idle - BYTES).await;
}

#[test]
fn only_the_agent_may_ask() {
    // A probe and a successor are refused before anything is looked at.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let node = Node::start();
        let _keeper = node.keeper().await;
        for role in [Role::Probe, Role::Successor] {
            let other = Keeper::connect_as(&node.socket(), role).await.unwrap();
            let error = other.park(ask(&node)).await.unwrap_err();
            assert_eq!(error.reason(), Some(Reason::NotAllowed));
        }
    });
}
