use std::sync::Arc;

use highwater_policy::{
    leak::{Detector, Finding, FindingKind, LifeEnd, Settings},
    time::Millis,
};

use super::{Alarm, Detect};
use crate::series::{Point, Series};

/// A life begins so long after the one before, in milliseconds.
const BETWEEN_LIVES: u64 = 60_000;

/// What policy says of leak detection where it says nothing: nothing is set for the bench.
pub(crate) fn settings() -> Arc<Settings> {
    Arc::new(Settings::default())
}

/// Highwater's detector on a life.
#[derive(Debug)]
pub(crate) struct Highwater {
    detector: Detector,
    capacity: u64,
    /// When the present life began on the detector's clock.
    begin: u64,
    /// The last finding.
    pub finding: Option<Finding>,
}

impl Highwater {
    /// For a first life.
    pub(crate) fn new(settings: &Arc<Settings>, series: &Series) -> Self {
        let detector = Detector::new(Arc::clone(settings));
        Self { detector, capacity: series.capacity, begin: 0, finding: None }
    }

    /// For a life that follows a healthy one.
    pub(crate) fn after(settings: &Arc<Settings>, earlier: &Series) -> Self {
        let mut this = Self::new(settings, earlier);
        for point in &earlier.points {
            this.push(point);
        }
        this.begin = earlier.points.last().map_or(0, |p| p.at) + BETWEEN_LIVES;
        this.detector.begin_life(Millis(this.begin), LifeEnd::Healthy);
        this.finding = None;
        this
    }

    /// Tells it that the pod can come to another size from now on.
    #[cfg(test)]
    pub(crate) fn limit(&mut self, capacity: u64) {
        self.capacity = capacity;
    }

    /// Tells it the plateau that the pod declares.
    pub(crate) fn declare(&mut self, bytes: Option<u64>) {
        self.detector.declared(bytes);
    }
}

impl Detect for Highwater {
    fn push(&mut self, point: &Point) -> Option<Alarm> {
        let finding = self.detector.push(&point.sample(self.begin, self.capacity))?;
        let alarm = match finding.kind {
            FindingKind::Act => Some(Alarm::Act),
            FindingKind::Suspect => Some(Alarm::Suspect),
            FindingKind::Cleared => None,
        };
        self.finding = Some(finding);
        alarm
    }
}
