//! What a framework says of itself, in Prometheus' text format.
//!
//! Whoever serves it may send anything: what is not understood is left out, line by line, and a number
//! that makes no sense is missing.

use crate::leak::{Framework, number::whole};

/// Devices that are told apart.
const DEVICES: usize = 16;
/// Counters of work, the best first: of several only the first that is there counts. With the first all
/// of the same place are added up.
const WORK: [(&str, u8); 7] = [
    ("highwater_work_total", 0),
    ("vllm:prompt_tokens_total", 1),
    ("vllm:generation_tokens_total", 1),
    ("sglang:prompt_tokens_total", 2),
    ("sglang:generation_tokens_total", 2),
    ("nv_inference_count", 3),
    ("nv_inference_request_success", 4),
];

/// The numbers of a pod's framework.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Numbers {
    allocated: Sizes,
    reserved: Sizes,
    /// Replays of CUDA graphs so far.
    pub replays: Option<u64>,
    /// Work done so far.
    pub work: Option<f64>,
}

/// Sizes in bytes: of devices that are named, and of the rest.
#[derive(Clone, Debug, Default, PartialEq)]
struct Sizes {
    named: Vec<(String, u64)>,
    rest: Option<u64>,
}

impl Sizes {
    fn add(&mut self, device: Option<String>, bytes: u64) {
        let Some(device) = device else {
            self.rest = Some(self.rest.unwrap_or(0).saturating_add(bytes));
            return;
        };
        if let Some((_, sum)) = self.named.iter_mut().find(|(name, _)| *name == device) {
            *sum = sum.saturating_add(bytes);
        } else if self.named.len() < DEVICES {
            self.named.push((device, bytes));
        }
    }

    fn of(&self, device: &str, only: bool) -> Option<u64> {
        let named = self.named.iter().find(|(name, _)| name == device).map(|(_, bytes)| *bytes);
        named.or(self.rest.filter(|_| only && self.named.is_empty()))
    }
}

impl Numbers {
    /// Reads a text.
    pub fn read(text: &str) -> Self {
        let mut numbers = Self::default();
        let mut work: Option<(u8, f64)> = None;
        for Line { name, labels, value } in text.lines().filter_map(line) {
            match name {
                "highwater_framework_allocated_bytes" => {
                    numbers.allocated.add(label(labels, "device"), whole(value));
                }
                "highwater_framework_reserved_bytes" => {
                    numbers.reserved.add(label(labels, "device"), whole(value));
                }
                "highwater_graph_replays_total" => {
                    let sum = numbers.replays.unwrap_or(0).saturating_add(whole(value));
                    numbers.replays = Some(sum);
                }
                name => {
                    let Some((_, place)) = WORK.iter().find(|(known, _)| *known == name) else { continue };
                    work = match work {
                        Some((before, sum)) if before == *place => Some((before, sum + value)),
                        Some((before, sum)) if before < *place => Some((before, sum)),
                        _ => Some((*place, value)),
                    };
                }
            }
        }
        numbers.work = work.map(|(_, sum)| sum).filter(|sum| sum.is_finite());
        numbers
    }

    /// Whether there is any number in it that is known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What it says of a device by its UUID. What names no device is of the pod's only one.
    pub fn of_device(&self, device: &str, only: bool) -> Framework {
        Framework { allocated: self.allocated.of(device, only), reserved: self.reserved.of(device, only) }
    }
}

/// A line: name, labels as they are written, and a number that is finite and not negative.
struct Line<'a> {
    name: &'a str,
    labels: &'a str,
    value: f64,
}

fn line(text: &str) -> Option<Line<'_>> {
    let text = text.trim();
    if text.is_empty() || text.starts_with('#') {
        return None;
    }
    let end = text.find(|c: char| c == '{' || c.is_ascii_whitespace())?;
    let (name, rest) = text.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => {
            let close = end_of_labels(inside)?;
            (inside.get(..close)?, inside.get(close + 1..)?)
        }
        None => ("", rest),
    };
    let value: f64 = rest.split_ascii_whitespace().next()?.parse().ok()?;
    (value.is_finite() && value >= 0.0).then_some(Line { name, labels, value })
}

/// Where the brace is that ends the labels: none within quotes.
fn end_of_labels(text: &str) -> Option<usize> {
    let (mut quoted, mut escaped) = (false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            '}' if !quoted => return Some(at),
            _ => {}
        }
    }
    None
}

/// The value of a label, as far as it needs no escapes: those that matter here do not.
fn label(labels: &str, name: &str) -> Option<String> {
    labels.split(',').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        let value = value.trim().strip_prefix('"')?.strip_suffix('"')?;
        (key.trim() == name && value.len() <= 64).then(|| value.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn work(text: &str) -> Option<f64> {
        Numbers::read(text).work
    }

    #[test]
    fn the_numbers_of_known_engines_are_work() {
        let vllm = "# HELP vllm:prompt_tokens_total Number of prefill tokens.\n\
            # TYPE vllm:prompt_tokens_total counter\n\
            vllm:prompt_tokens_total{engine=\"0\",model_name=\"m\"} 100.0\n\
            vllm:generation_tokens_total{engine=\"0\",model_name=\"m\"} 5.0e2\n\
            vllm:generation_tokens_total{engine=\"1\",model_name=\"m\"} 50 1395066363000\n";
        assert_eq!(work(vllm), Some(650.0));
        assert_eq!(work("sglang:prompt_tokens_total{model_name=\"a}b\"} 7\n"), Some(7.0));
        assert_eq!(
            work("nv_inference_count{model=\"x\",version=\"1\"} 3\nnv_inference_request_success 2\n"),
            Some(3.0)
        );
        assert_eq!(work(&format!("{vllm}highwater_work_total 9\n")), Some(9.0), "its own word is the best");
        assert_eq!(work("up 1\n"), None);
    }

    #[test]
    fn sizes_are_of_the_device_that_is_named_or_of_the_only_one() {
        let named = Numbers::read(
            "highwater_framework_allocated_bytes{device=\"GPU-0\"} 10\n\
             highwater_framework_allocated_bytes{device=\"GPU-1\",pool=\"x\"} 20\n\
             highwater_framework_allocated_bytes{pool=\"y\", device=\"GPU-1\"} 2\n",
        );
        assert_eq!(named.of_device("GPU-1", false).allocated, Some(22));
        assert_eq!(named.of_device("GPU-2", true).allocated, None);
        let rest = Numbers::read("highwater_framework_reserved_bytes 30\nhighwater_graph_replays_total 4\n");
        assert_eq!((rest.of_device("GPU-0", true).reserved, rest.replays), (Some(30), Some(4)));
        assert_eq!(rest.of_device("GPU-0", false).reserved, None, "nobody knows of which");
    }

    #[test]
    fn what_makes_no_sense_is_missing() {
        for text in [
            "highwater_work_total NaN",
            "highwater_work_total +Inf",
            "highwater_work_total -1",
            "highwater_work_total",
            "highwater_work_total{a=\"b\" 5",
            "highwater_work_total{a=\"b\\\"} 5",
            "highwater_work_total five",
            "<html>",
            "",
        ] {
            assert!(Numbers::read(text).is_empty(), "{text}");
        }
        let many: Vec<String> =
            (0..99).map(|i| format!("highwater_framework_allocated_bytes{{device=\"{i}\"}} 1\n")).collect();
        assert_eq!(Numbers::read(&many.concat()).allocated.named.len(), DEVICES);
    }

    proptest! {
        #[test]
        fn nothing_is_too_wild(text in "(highwater_work_total|vllm:prompt_tokens_total|x)?[{}\"\\\\=, a-z0-9.\n]{0,200}") {
            let numbers = Numbers::read(&text);
            prop_assert!(numbers.work.is_none_or(|work| work.is_finite() && work >= 0.0));
        }
    }
}
