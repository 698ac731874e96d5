//! Memory whose charge cannot be made good after the driver has given it: it is given back, and is
//! neither lost nor had for nothing.

use std::path::PathBuf;

use crate::agent::Agent;
use crate::host::{Host, Program, Volume};
use crate::{CONTEXT, GIB, MIB, REFUSED};

const LIMIT: u64 = 2 * CONTEXT + GIB;

/// `CUDA_ERROR_UNKNOWN`
const BROKEN: &str = "999";

/// What each order takes at least.
const TAKEN: u64 = 64 * MIB;

/// What the driver takes of a device for a context beside the context itself, or less.
const OVERHEAD: u64 = 8 * MIB;

/// Calls of the driver that a program finds failing.
struct Faults {
    file: PathBuf,
}

impl Faults {
    /// None yet, and a program that is to find them.
    fn of_program(volume: &Volume<'_>) -> (Self, Program) {
        let file = volume.library().with_file_name("failing-calls");
        let faults = Self { file };
        faults.end();
        let mut command = volume.command("handle");
        command.env("GPUSIM_FAILING_CALLS", &faults.file);
        (faults, command.into())
    }

    fn begin(&self, functions: &[&str]) {
        let lines: Vec<_> = functions.iter().map(|function| format!("{function} {BROKEN}\n")).collect();
        // Nobody is to read half of it.
        let new = self.file.with_extension("new");
        std::fs::write(&new, lines.concat()).unwrap();
        std::fs::rename(new, &self.file).unwrap();
    }

    fn end(&self) {
        self.begin(&[]);
    }
}

/// Every function that the guard calls of its own accord.
fn queries() -> Vec<&'static str> {
    let source = include_str!("../../src/symbols.rs");
    let list = source.split_once("called Cuda {").unwrap().1.split_once('}').unwrap().0;
    let names: Vec<_> = list.split_whitespace().collect();
    assert!(names.len() > 15 && names.iter().all(|name| name.starts_with("cu")), "{names:?}");
    names
}

#[test]
fn s3_what_turns_out_larger_than_was_charged_and_does_not_fit_is_given_back() {
    let host = Host::start();
    let pod = host.pod(CONTEXT + 4 * MIB);
    let mut program = pod.ready();
    // Two blocks with room for 648 KiB each: a mebibyte is expected to fit into what is charged already,
    // and the driver takes a third block for it.
    program.succeed(&["alloc a 1400K", "alloc b 1400K"]);
    let (used, charged) = (host.memory().used, pod.agent.charged());
    assert_eq!(charged, CONTEXT + 4 * MIB);
    for _ in 0..3 {
        assert_eq!(program.ask("alloc c 1M"), REFUSED);
        assert_eq!((host.memory().used, pod.agent.charged()), (used, charged));
    }
    // What does fit is to be had still.
    program.succeed(&["alloc c 600K", "free a", "free b", "free c"]);
    assert_eq!(pod.agent.charged(), CONTEXT);
}

#[test]
fn s7_a09_where_a_pool_does_not_say_what_it_has_taken_the_memory_is_freed_and_the_error_returned() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let (faults, mut program) = Faults::of_program(&pod.volume);
    program.start();
    program.succeed(&["stream", "pool p"]);
    let used = host.memory().used;
    for order in ["async x 64M", "frompool x p 64M"] {
        faults.begin(&["cuMemPoolGetAttribute"]);
        for _ in 0..3 {
            assert_eq!(program.ask(order), BROKEN, "{order}");
        }
        faults.end();
        program.succeed(&["sync"]);
        assert_eq!((host.memory().used, pod.agent.charged()), (used, CONTEXT), "{order}");
        program.succeed(&[order, "asyncfree x", "sync"]);
        assert_eq!((host.memory().used, pod.agent.charged()), (used, CONTEXT), "{order}");
    }
}

/// An order, and those that undo it.
type Step = (String, &'static [&'static str]);

fn step(order: &str, undo: &'static [&'static str]) -> Step {
    (order.to_owned(), undo)
}

/// What takes at least [`TAKEN`] each time, once all of its steps are done.
fn orders(handle: &str) -> Vec<Vec<Step>> {
    let one = |order: &str, undo| vec![step(order, undo)];
    vec![
        one("alloc x 64M", &["free x"]),
        one("pitch x 1M 64", &["free x"]),
        one("managed x 64M", &["free x"]),
        one("create x 64M", &["release x"]),
        one("async x 64M", &["asyncfree x"]),
        one("frompool x p 64M", &["asyncfree x"]),
        one("array x 4096 1024", &["endarray x"]),
        one("mipmap x 4096 1024", &["endmipmap x"]),
        one("context x", &["endcontext x", "retain"]),
        vec![step("instantiate x g", &["endexecutable x", "graphtrim"]), step("launch x", &["sync"])],
        // Memory of another pod.
        one(&format!("ipcopen x {handle}"), &["ipcclose x"]),
        vec![step("import x d", &["release x"]), step("map r 0 x 64M", &["unmap r 0 64M"])],
    ]
}

#[test]
fn s3_s7_whatever_the_driver_does_not_answer_no_memory_is_had_uncharged_or_lost() {
    let host = Host::start();
    let maker = host.pod(LIMIT);
    let mut neighbour = maker.ready();
    neighbour.succeed(&["alloc a 64M", "create c 64M", "export d c"]);
    let handle = neighbour.ask("ipcget a").strip_prefix("0 ").unwrap().to_owned();

    let volume = host.volume("other");
    let agent = Agent::of_pod(&volume.socket(), &[host.quota(0, LIMIT)], "another-pod");
    let (faults, mut program) = Faults::of_program(&volume);
    program.start();
    program.succeed(&[&format!("fetch d {} {}", neighbour.pid(), neighbour.ask("number d"))]);
    program.succeed(&["stream", "pool p", "reserve r 1G", "graph g", "node g n 64M", "freenode g n", "sync"]);
    let rest = (host.memory().used, agent.charged());
    assert_eq!(rest.1, CONTEXT);
    let (mut given, mut withheld) = (0, 0);
    for query in queries() {
        for steps in orders(&handle) {
            let name = format!("{} without {query}", steps[0].0);
            faults.begin(&[query]);
            let mut done = 0;
            for (order, _) in &steps {
                let answer = program.ask(order);
                if answer != "0" {
                    assert_ne!(answer, REFUSED, "{name}");
                    break;
                }
                done += 1;
            }
            if done == steps.len() {
                let more = (host.memory().used - rest.0, agent.charged() - rest.1);
                assert!(more.1 >= TAKEN && more.0 <= more.1 + OVERHEAD, "{name}: {more:?}");
                given += 1;
            } else {
                withheld += 1;
            }
            faults.end();
            for (_, undo) in steps[..done].iter().rev() {
                program.succeed(undo);
            }
            program.succeed(&["sync"]);
            assert_eq!((host.memory().used, agent.charged()), rest, "{name}");
        }
    }
    assert!(given > 100 && withheld > 10, "{given} given, {withheld} withheld");
    assert!(agent.is_consistent());
}

#[test]
fn s3_memory_of_a_device_that_does_not_say_which_it_is_is_not_had() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let (faults, mut program) = Faults::of_program(&pod.volume);
    faults.begin(&["cuDeviceGetUuid", "cuDeviceGetUuid_v2"]);
    program.succeed(&["init"]);
    let used = host.memory().used;
    for order in ["create x 64M", "retain", "context x"] {
        assert_eq!(program.ask(order), BROKEN, "{order}");
        assert_eq!((host.memory().used, pod.agent.charged()), (used, 0), "{order}");
    }
    faults.end();
    program.succeed(&["retain", "create x 64M"]);
    assert_eq!(pod.agent.charged(), CONTEXT + TAKEN);
}

#[test]
fn b06_a_program_whose_loader_cannot_read_the_guard_is_unknown_to_the_agent_and_known_to_the_driver() {
    let host = Host::start();
    let pod = host.pod(LIMIT);
    let before = host.memory().used;
    // The loader says that it cannot, and goes on without.
    std::fs::write(pod.volume.library(), "").unwrap();
    let mut program = pod.ready();
    program.succeed(&["alloc a 8G"]);
    // What the agent sees of such a program: memory in the driver's lists, and nobody who said hello.
    assert!(host.memory().used - before >= CONTEXT + 8 * GIB);
    assert_eq!((pod.agent.heard().hellos, pod.agent.charged()), (0, 0));
}
