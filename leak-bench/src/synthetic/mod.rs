//! Made lives of pods: right use of eight families, and the same with a leak inside.

pub(crate) mod shapes;
pub(crate) mod unseen;

use crate::{
    disturb,
    inject::{self, Kind},
    load::Load,
    noise::Noise,
    number::{GIB, whole},
    random::Random,
    series::{Point, Series, Truth},
    side::Side,
};
use shapes::{Family, Shape};

/// A workload: what all lives of its pods have in common.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    pod: String,
    family: Family,
    number: usize,
    capacity: f64,
    /// What it holds at the beginning and at most, as shares of the capacity.
    floor: f64,
    peak: f64,
    /// Whether it says how much it works.
    signal: bool,
    gpu: bool,
    cadence: f64,
    /// Where the random numbers of its shape begin.
    shape: Random,
}

impl Workload {
    /// A workload of a family. `peaks`: between which shares of the capacity its peak is drawn.
    pub(crate) fn new(pool: &str, family: Family, number: usize, peaks: (f64, f64)) -> Self {
        let pod = format!("{pool}-{}-{number}", family.name());
        let mut random = Random::of(&pod);
        let gpu = family == Family::KvFill || random.chance(0.5);
        let capacity = if gpu {
            GIB * random.pick(&[24.0, 48.0, 80.0, 141.0]).unwrap_or(80.0)
        } else {
            GIB * random.log_uniform(4.0, 256.0)
        };
        let peak = random.uniform(peaks.0, peaks.1);
        let floor = peak * random.uniform(0.15, 0.8);
        let signal = random.chance(0.5);
        let cadence = if number.is_multiple_of(2) { 10.0 } else { 60.0 };
        Self { pod, family, number, capacity, floor, peak, signal, gpu, cadence, shape: random }
    }

    /// Its side.
    pub(crate) fn side(&self) -> Side {
        Side::of(&self.pod)
    }

    /// One of its lives, without a leak. Two lives share the shape, and neither noise nor load.
    pub(crate) fn life(&self, life: usize, length: f64) -> Series {
        let mut series = self.undisturbed(life, length);
        let mut random = Random::of(&format!("{}/gaps/{life}", self.pod));
        self.observe(&mut series, &mut random);
        series
    }

    /// What is seen of a life.
    fn observe(&self, series: &mut Series, random: &mut Random) {
        if !self.signal {
            series.points.iter_mut().for_each(|point| point.work = None);
        }
        disturb::gaps(&mut series.points, random);
    }

    /// How long its lives are, in seconds.
    pub(crate) fn length(&self) -> f64 {
        shapes::length(self.number)
    }

    fn undisturbed(&self, life: usize, length: f64) -> Series {
        let mut workload = self.shape.clone();
        let mut random = Random::of(&format!("{}/life/{life}", self.pod));
        let mut shape = Shape::new(self.family, length, &mut workload);
        let mut load = if self.family == Family::Diurnal {
            Load::daily(&mut workload, &mut random)
        } else {
            Load::new(&mut workload, &mut random)
        };
        let mut noise = Noise::new(self.gpu, self.capacity, &mut workload);
        let scale = workload.log_uniform(0.05, 50.0);
        let begin = random.uniform(30.0, 300.0);
        let (mut age, mut done) = (0.0, 0.0);
        let mut points = Vec::new();
        while age < length {
            let level = if age < begin {
                self.floor * (0.02 + 0.98 * age / begin)
            } else {
                let load = load.step(age, self.cadence, &mut random);
                done += load * self.cadence;
                let x = shape.step(age - begin, self.cadence, load, &mut random);
                self.floor + (self.peak - self.floor) * x
            };
            let bytes = noise.add(level * self.capacity, self.cadence, &mut random);
            points.push(Point {
                at: whole(age * 1000.0),
                bytes: Some(whole(bytes.min(0.995 * self.capacity))),
                work: Some(done * scale),
            });
            age += self.cadence;
        }
        Series {
            pod: self.pod.clone(),
            family: self.family.name().to_owned(),
            capacity: whole(self.capacity),
            declared: (self.family == Family::KvFill).then(|| whole(self.peak * self.capacity)),
            points,
            truth: Truth::Benign,
        }
    }

    /// A life with a leak of a kind in it, which runs out after about `hours`, between two
    /// bounds; `None` where it does not run out within the life.
    pub(crate) fn leaking(&self, life: usize, kind: Kind, hours: (f64, f64)) -> Option<Series> {
        let mut random = Random::of(&format!("{}/leak/{life}", self.pod));
        let takes = random.log_uniform(hours.0, hours.1) * 3600.0;
        let onset = if random.chance(0.3) { 300.0 } else { random.uniform(0.05, 0.6) * 86_400.0 };
        let mut series = self.undisturbed(life, onset + 1.5 * takes);
        series.declared = None;
        inject::leak(&mut series, kind, onset, takes, &mut random)?;
        self.observe(&mut series, &mut random);
        series.family = format!("{} {}", self.family.name(), kind.name());
        Some(series)
    }
}

#[cfg(test)]
mod tests {
    use super::{shapes::FAMILIES, *};

    #[test]
    fn two_lives_of_a_workload_are_alike_and_not_the_same() {
        for family in FAMILIES {
            let workload = Workload::new("test", family, 1, (0.5, 0.9));
            let lives = [0, 1].map(|life| workload.life(life, 43_200.0));
            assert_ne!(lives[0].points, lives[1].points);
            assert_eq!(lives[0].points, workload.life(0, 43_200.0).points);
            assert_eq!(lives[0].capacity, lives[1].capacity);
        }
    }

    #[test]
    fn a_leak_runs_out_about_when_it_is_to() {
        let (mut made, mut near) = (0, 0);
        for family in FAMILIES {
            for number in 0..10 {
                let workload = Workload::new("test", family, number, (0.3, 0.85));
                let Some(series) = workload.leaking(0, Kind::Linear, (4.0, 4.01)) else { continue };
                let Truth::Leak { onset, exhausted } = series.truth else { panic!() };
                made += 1;
                near += u32::from((8_000_000..20_000_000).contains(&(exhausted - onset)));
                assert_eq!(series.points.iter().map(|p| p.at).max().unwrap() / 120_000, exhausted / 120_000);
            }
        }
        assert!(made >= 70 && near * 10 >= made * 9, "{made} made, {near} near");
    }
}
