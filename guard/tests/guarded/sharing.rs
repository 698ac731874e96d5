//! Memory that is handed from process to process, and descriptors that keep it.

use crate::agent::Agent;
use crate::host::Host;
use crate::{CONTEXT, GIB, MIB, REFUSED};

const LIMIT: u64 = 3 * CONTEXT + GIB;

#[test]
fn an_exported_descriptor_keeps_memory_charged_until_its_last_duplicate_is_closed() {
    let host = Host::start();
    let pod = host.pod(CONTEXT + GIB);
    let mut program = pod.ready();
    // Create, export, release: without this the quota would be no limit at all.
    program.succeed(&["create a 768M", "export d a", "release a"]);
    assert_eq!(program.ask("create b 512M"), REFUSED);
    assert_eq!(pod.agent.charged(), CONTEXT + 768 * MIB);
    // A duplicate in another process keeps it as well.
    let mut holder = host.unguarded();
    holder.succeed(&[&format!("fetch d {} {}", program.pid(), program.ask("number d"))]);
    program.succeed(&["close d"]);
    assert_eq!(program.ask("create b 512M"), REFUSED);
    holder.succeed(&["close d"]);
    program.succeed(&["create b 512M"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 512 * MIB);
}

#[test]
fn what_a_process_imports_of_its_own_is_what_it_exported() {
    let host = Host::start();
    let pod = host.pod(CONTEXT + GIB);
    let mut program = pod.ready();
    program.succeed(&["create a 768M", "export d a", "import again d", "release a", "close d"]);
    assert_eq!(pod.agent.charged(), CONTEXT + 768 * MIB);
    assert_eq!(program.ask("create b 512M"), REFUSED);
    program.succeed(&["reserve r 1G", "map r 0 again 768M", "release again"]);
    assert_eq!(program.ask("create b 512M"), REFUSED);
    program.succeed(&["unmap r 0 768M", "create b 512M"]);
}

#[test]
fn handles_of_the_same_pod_are_free_and_those_of_another_are_charged() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let (mut maker, mut neighbour) = (pod.ready(), pod.ready());
    maker.succeed(&["alloc a 512M"]);
    let handle = maker.ask("ipcget a");
    let handle = handle.strip_prefix("0 ").unwrap();
    neighbour.succeed(&[&format!("ipcopen b {handle}")]);
    assert_eq!(pod.agent.charged(), 2 * CONTEXT + 512 * MIB);
    neighbour.succeed(&["ipcclose b"]);
    assert_eq!(pod.agent.charged(), 2 * CONTEXT + 512 * MIB);

    let other = host.volume("other");
    let agent = Agent::of_pod(&other.socket(), &[host.quota(0, CONTEXT + 768 * MIB)], "another-pod");
    let mut stranger = other.program();
    stranger.start();
    stranger.succeed(&[&format!("ipcopen c {handle}")]);
    assert_eq!(agent.charged(), CONTEXT + 512 * MIB);
    assert_eq!(stranger.ask("alloc d 512M"), REFUSED);
    stranger.succeed(&["ipcclose c", "alloc d 512M", "free d"]);
    stranger.succeed(&["alloc d 512M"]);
    assert_eq!(stranger.ask(&format!("ipcopen c {handle}")), REFUSED);
    assert_eq!(agent.charged(), CONTEXT + 512 * MIB);
}

#[test]
fn descriptors_of_the_same_pod_are_free_and_those_of_another_are_charged_as_far_as_they_are_mapped() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let (mut maker, mut neighbour) = (pod.ready(), pod.ready());
    maker.succeed(&["create a 512M", "export d a"]);
    let fetch = format!("fetch d {} {}", maker.pid(), maker.ask("number d"));
    neighbour.succeed(&[&fetch, "import b d", "reserve r 1G", "map r 0 b 512M"]);
    assert_eq!(pod.agent.charged(), 2 * CONTEXT + 512 * MIB);

    let other = host.volume("other");
    let agent = Agent::of_pod(&other.socket(), &[host.quota(0, CONTEXT + 768 * MIB)], "another-pod");
    let mut stranger = other.program();
    stranger.start();
    stranger.succeed(&[&fetch, "import b d", "reserve r 1G"]);
    assert_eq!(agent.charged(), CONTEXT);
    stranger.succeed(&["map r 0 b 512M"]);
    assert_eq!(agent.charged(), CONTEXT + 512 * MIB);
    assert_eq!(stranger.ask("alloc c 512M"), REFUSED);
    stranger.succeed(&["release b"]);
    assert_eq!(agent.charged(), CONTEXT + 512 * MIB);
    stranger.succeed(&["unmap r 0 512M"]);
    assert_eq!(agent.charged(), CONTEXT);
    stranger.succeed(&["alloc c 512M", "import b d"]);
    assert_eq!(stranger.ask("map r 0 b 512M"), REFUSED);
}
