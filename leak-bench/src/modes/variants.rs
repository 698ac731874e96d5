//! Programs that leak in each of the coarse modes, as the agent would see them from outside: three
//! variants of each for tuning, three that are held back from it.
//!
//! What the driver says of a pod is what its framework reserved, what it took outside of it, and a
//! context; what the framework allocated goes up and down with the work. A variant says where the
//! leak goes; which load, how large, how even and how fast it is follows from its name.

use highwater_policy::leak::LeakMode;

use crate::{
    load::Load,
    number::{GIB, MIB, count, real, whole},
    random::Random,
};

/// Seconds between two samples.
const CADENCE: f64 = 10.0;
/// What the device has.
pub(super) const CAPACITY: f64 = 80.0 * GIB;
/// Lives are this long at most, in seconds.
const LENGTH: f64 = 14.0 * 3600.0;
/// One in so many numbers is missing.
const MISSING: f64 = 0.01;
/// The framework reserves in pieces of this size.
const PIECE: f64 = 20.0 * MIB;

/// The modes, in the order of the table.
pub(crate) const MODES: [LeakMode; 6] = [
    LeakMode::HeldByFramework,
    LeakMode::OutsideFramework,
    LeakMode::AllocatorRetention,
    LeakMode::PerReplay,
    LeakMode::OneRank,
    LeakMode::HostOrManaged,
];

/// What a variant of a mode does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Variant {
    /// The true mode.
    pub mode: LeakMode,
    /// In words.
    pub name: &'static str,
    /// Held back from tuning.
    pub unseen: bool,
}

const fn variant(mode: LeakMode, name: &'static str, unseen: bool) -> Variant {
    Variant { mode, name, unseen }
}

/// All variants.
pub(super) const VARIANTS: [Variant; 36] = [
    variant(LeakMode::HeldByFramework, "tensors kept", false),
    variant(LeakMode::HeldByFramework, "a graph kept, a tenth of it fragments", false),
    variant(LeakMode::HeldByFramework, "a cache without a bound, in steps", false),
    variant(LeakMode::HeldByFramework, "tensors kept beside large batches", true),
    variant(LeakMode::HeldByFramework, "tensors kept while graphs are replayed often", true),
    variant(LeakMode::HeldByFramework, "tensors kept, some more outside of it", true),
    variant(LeakMode::OutsideFramework, "raw memory", false),
    variant(LeakMode::OutsideFramework, "raw memory, in steps", false),
    variant(LeakMode::OutsideFramework, "raw memory beside large batches", false),
    variant(LeakMode::OutsideFramework, "raw memory while graphs are replayed often", true),
    variant(LeakMode::OutsideFramework, "raw memory, the framework caches a little more", true),
    variant(LeakMode::OutsideFramework, "raw memory, the host grows a little", true),
    variant(LeakMode::AllocatorRetention, "reserved grows, allocated does not", false),
    variant(LeakMode::AllocatorRetention, "the same in large pieces", false),
    variant(LeakMode::AllocatorRetention, "the same beside large batches", false),
    variant(LeakMode::AllocatorRetention, "allocated grows by a quarter of it", true),
    variant(LeakMode::AllocatorRetention, "allocated falls", true),
    variant(LeakMode::AllocatorRetention, "the same while graphs are replayed often", true),
    variant(LeakMode::PerReplay, "outside of the framework", false),
    variant(LeakMode::PerReplay, "outputs kept", false),
    variant(LeakMode::PerReplay, "with the load of the day", false),
    variant(LeakMode::PerReplay, "at every tenth replay", true),
    variant(LeakMode::PerReplay, "outputs kept beside large batches", true),
    variant(LeakMode::PerReplay, "some more at each request besides", true),
    variant(LeakMode::OneRank, "one of four keeps tensors", false),
    variant(LeakMode::OneRank, "one of eight takes raw memory", false),
    variant(LeakMode::OneRank, "one of two keeps tensors", false),
    variant(LeakMode::OneRank, "one of eight, the others a tenth of it", true),
    variant(LeakMode::OneRank, "one of four retains", true),
    variant(LeakMode::OneRank, "one of four, beside large batches", true),
    variant(LeakMode::HostOrManaged, "managed memory, on both sides", false),
    variant(LeakMode::HostOrManaged, "host buffers alone", false),
    variant(LeakMode::HostOrManaged, "managed memory, in steps", false),
    variant(LeakMode::HostOrManaged, "managed memory, four fifths on the host", true),
    variant(LeakMode::HostOrManaged, "host buffers, a noisy host", true),
    variant(LeakMode::HostOrManaged, "managed memory beside large batches", true),
];

/// A moment of a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    /// Milliseconds since it began.
    pub at: u64,
    /// What the driver counts.
    pub driver: Option<u64>,
    /// What the framework reserved,
    pub reserved: Option<u64>,
    /// and allocated of it.
    pub allocated: Option<u64>,
    /// What the pod holds on the host.
    pub host: Option<u64>,
    /// Requests so far.
    pub work: f64,
    /// Graphs replayed so far; `None` where none ever is.
    pub replays: Option<u64>,
}

/// Where what leaks goes, as shares of it.
#[derive(Clone, Copy, Debug, Default)]
struct Ways {
    allocated: f64,
    retained: f64,
    outside: f64,
    host: f64,
}

/// What is drawn for a life.
#[derive(Clone, Debug)]
struct Life {
    ways: Ways,
    /// Bytes that leak a second at a load of one,
    rate: f64,
    /// and at each replay.
    a_replay: f64,
    /// Leaks come at once after so many bytes; 0: as they come.
    step: f64,
    /// What batches take for a moment, in bytes.
    batch: f64,
    /// Replays a second at a load of one.
    replays: f64,
    /// Deviation of the host, in bytes.
    host_noise: f64,
    onset: f64,
}

fn life(variant: &Variant, leaks: f64, random: &mut Random) -> Life {
    let name = variant.name;
    let has = |word: &str| name.contains(word);
    let mut ways = match variant.mode {
        LeakMode::HeldByFramework | LeakMode::PerReplay | LeakMode::OneRank => {
            Ways { allocated: 1.0, ..Ways::default() }
        }
        LeakMode::OutsideFramework => Ways { outside: 1.0, ..Ways::default() },
        LeakMode::AllocatorRetention => Ways { retained: 1.0, ..Ways::default() },
        LeakMode::HostOrManaged => Ways { outside: 1.0, host: 1.0, ..Ways::default() },
    };
    if has("a tenth of it fragments") {
        ways.retained = 0.1;
    } else if has("some more outside") {
        ways.outside = random.uniform(0.1, 0.35);
    } else if has("caches a little more") {
        ways.retained = random.uniform(0.1, 0.35);
    } else if has("the host grows a little") {
        ways.host = random.uniform(0.1, 0.3);
    } else if has("a quarter of it") {
        (ways.retained, ways.allocated) = (0.75, 0.25);
    } else if has("allocated falls") {
        (ways.retained, ways.allocated) = (1.1, -0.1);
    } else if has("four fifths") {
        ways.host = 0.8;
    } else if has("host buffers") {
        ways.outside = 0.0;
    } else if has("takes raw") || has("outside of the framework") {
        (ways.outside, ways.allocated) = (1.0, 0.0);
    } else if has("retains") {
        (ways.retained, ways.allocated) = (1.0, 0.0);
    }
    let rate = leaks * GIB * random.log_uniform(2.0, 8.0) / 3600.0;
    let per_replay = variant.mode == LeakMode::PerReplay;
    let a_replay = MIB * random.log_uniform(1.0, 4.0);
    Life {
        ways,
        rate: match per_replay {
            true if has("besides") => 0.2 * rate,
            true => 0.0,
            false => rate,
        },
        a_replay: if per_replay { a_replay } else { 0.0 },
        step: if has("steps") || has("large pieces") {
            GIB * random.uniform(0.25, 1.0)
        } else if has("tenth replay") {
            10.0 * a_replay
        } else {
            0.0
        },
        batch: GIB * if has("large batches") { random.uniform(2.0, 6.0) } else { random.uniform(0.0, 0.3) },
        replays: if per_replay {
            rate / a_replay
        } else if has("replayed often") {
            random.log_uniform(5.0, 50.0)
        } else {
            0.0
        },
        host_noise: MIB * if has("noisy") { 400.0 } else { 40.0 },
        onset: random.uniform(0.3, 2.0) * 3600.0,
    }
}

/// The ranks of a run of a variant, moment by moment.
pub(super) fn run(variant: &Variant, number: usize) -> Vec<Vec<Moment>> {
    let name = format!("mode/{:?}/{}/{number}", variant.mode, variant.name);
    let ranks = match variant.mode {
        LeakMode::OneRank if variant.name.contains("eight") => 8,
        LeakMode::OneRank if variant.name.contains("two") => 2,
        LeakMode::OneRank => 4,
        _ => 1,
    };
    let others = if variant.name.contains("the others a tenth") { 0.1 } else { 0.0 };
    let leaking = count(Random::of(&format!("{name}/rank")).unit() * real(ranks) - 0.5).min(ranks - 1);
    (0..ranks).map(|rank| moments(variant, &name, rank, if rank == leaking { 1.0 } else { others })).collect()
}

fn moments(variant: &Variant, name: &str, rank: usize, leaks: f64) -> Vec<Moment> {
    // Ranks of one workload do the same work.
    let mut shared = Random::of(name);
    let life = life(variant, leaks, &mut shared);
    let (mut of_workload, mut of_load) = (shared.clone(), shared);
    let mut load = if variant.name.contains("of the day") {
        Load::daily(&mut of_workload, &mut of_load)
    } else {
        Load::new(&mut of_workload, &mut of_load)
    };
    let mut own = Random::of(&format!("{name}/{rank}"));
    let context = GIB * of_workload.uniform(0.3, 1.5);
    let weights = GIB * of_workload.uniform(8.0, 30.0);
    let host = GIB * of_workload.uniform(2.0, 10.0);
    let (mut leaked, mut debt, mut work, mut replays) = (0.0, 0.0, 0.0, 0.0);
    let (mut cached, mut wobble): (f64, f64) = (0.0, 0.0);
    let mut moments = Vec::new();
    let mut age = 0.0;
    while age < LENGTH {
        let now = load.step(age, CADENCE, &mut of_load);
        work += now * CADENCE;
        let replayed = now * life.replays * CADENCE;
        replays += replayed;
        if age >= life.onset {
            debt += now * life.rate * CADENCE + replayed * life.a_replay;
            if debt >= life.step {
                (leaked, debt) = (leaked + debt, 0.0);
            }
        }
        let loaded = (age / 240.0).min(1.0);
        let batch = life.batch * own.pick(&[0.4, 0.7, 1.0]).unwrap_or(1.0) * now.min(1.0);
        let allocated = weights * loaded + leaked * life.ways.allocated + batch;
        // What batches took stays reserved for the next.
        cached = f64::max(cached, batch);
        let reserved =
            weights * loaded + cached + leaked * (life.ways.allocated.max(0.0) + life.ways.retained);
        let reserved = ((reserved / PIECE).ceil() * PIECE).max(allocated);
        let driver = reserved + context + leaked * life.ways.outside;
        wobble = 0.95 * wobble + 0.31 * own.normal();
        let on_host = host * loaded + leaked * life.ways.host + wobble * life.host_noise;
        // Where the leak is on the host alone it ends there.
        if driver.max(leaked * life.ways.host) >= CAPACITY {
            break;
        }
        let mut seen = |bytes: f64| (!own.chance(MISSING)).then(|| whole(bytes));
        moments.push(Moment {
            at: whole(age * 1000.0),
            driver: seen(driver),
            reserved: seen(reserved),
            allocated: seen(allocated),
            host: seen(on_host),
            work,
            replays: (life.replays > 0.0).then(|| whole(replays)),
        });
        age += CADENCE;
    }
    moments
}
