//! What happens to samples between the driver and the detector.

use crate::{random::Random, series::Point};

/// Takes one sample in a hundred away: most of them as a missing value, some as a short silence.
pub(crate) fn gaps(points: &mut Vec<Point>, random: &mut Random) {
    let mut silent = 0u32;
    points.retain_mut(|point| {
        if silent > 0 {
            silent -= 1;
            return false;
        }
        if random.chance(0.0055) {
            if random.chance(0.7) {
                point.bytes = None;
            } else {
                silent = random.pick(&[1, 2, 4, 8]).unwrap_or(1) - 1;
                return false;
            }
        }
        true
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_sample_in_a_hundred_is_gone() {
        let point = |at| Point { at, bytes: Some(1), work: None };
        let mut points: Vec<Point> = (0..100_000).map(point).collect();
        gaps(&mut points, &mut Random::of("gaps"));
        let seen = points.iter().filter(|p| p.bytes.is_some()).count();
        assert!((98_700..99_300).contains(&seen), "{seen}");
    }
}
