//! Series as Prometheus answers a range query: one JSON object, read series by series.

use std::{
    collections::{BTreeMap, HashSet},
    fmt,
    io::Read,
};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use super::{
    Each, Fault, Labels, PodLabels, Row, Stop, csv::seconds, number, number::Misfit, shown, source::broken,
};

/// The labels that name the pod, in this order. What a scrape already had is kept by Prometheus under
/// `exported_`; then `pod` is the exporter's own.
const POD: [&str; 3] = ["exported_pod", "pod", "pod_name"];
/// Those that name the device.
const DEVICE: [&str; 4] = ["device", "UUID", "uuid", "gpu"];

/// What a person names, else what is usual.
fn either<'a>(given: Option<&'a str>, usual: &[&'a str]) -> Vec<&'a str> {
    given.map_or_else(|| usual.to_vec(), |name| vec![name])
}

/// The usual exporter's use of a device is in MiB, which its name does not say.
const IN_MIB: &str = "DCGM_FI_DEV_FB_";

/// Reads an answer and hands on each sample. Prometheus gives at most 11,000 samples a series: one
/// series is held at a time.
pub(crate) fn read(source: impl Read, labels: &Labels, each: &mut Each<'_>) -> Result<(), Stop> {
    let mut walk = Walk {
        pod: either(labels.pod.as_deref(), &POD),
        device: either(labels.device.as_deref(), &DEVICE),
        each,
        stopped: None,
        names: HashSet::new(),
        count: 0,
        status: None,
        error: None,
        kind: None,
        seen: false,
    };
    let mut json = serde_json::Deserializer::from_reader(source);
    let read = Answer(&mut walk).deserialize(&mut json).and_then(|()| json.end());
    if let Some(stopped) = walk.stopped {
        return Err(stopped);
    }
    if walk.status.as_deref().is_some_and(|status| status != "success") {
        let error = walk.error.as_deref().unwrap_or("no reason given");
        return Err(Fault::of_file(format!("Prometheus refused the query: {error}")).into());
    }
    read.map_err(unreadable)?;
    if !walk.seen {
        let what = "holds no data.result: save what /api/v1/query_range answers, whole";
        return Err(Fault::of_file(what).into());
    }
    if let Some(kind) = walk.kind.filter(|kind| kind != "matrix") {
        let what = format!("is of the type {kind}: ask for a range, at /api/v1/query_range");
        return Err(Fault::of_file(what).into());
    }
    Ok(())
}

/// What one pass over an answer knows.
struct Walk<'a> {
    pod: Vec<&'a str>,
    device: Vec<&'a str>,
    each: &'a mut Each<'a>,
    /// Why the pass was given up, where that is no fault of the JSON.
    stopped: Option<Stop>,
    /// Pod and device of every series so far.
    names: HashSet<Vec<u8>>,
    count: usize,
    status: Option<String>,
    error: Option<String>,
    kind: Option<String>,
    seen: bool,
}

#[derive(Deserialize)]
struct Series {
    #[serde(default)]
    metric: BTreeMap<String, String>,
    #[serde(default)]
    values: Vec<(f64, String)>,
    /// The one sample of an instant query.
    #[serde(default)]
    value: Option<IgnoredAny>,
}

impl Walk<'_> {
    fn series(&mut self, series: &Series) -> Result<(), Stop> {
        self.count += 1;
        let fault = |what: &str| Fault::of_file(format!("series {} {:?}: {what}", self.count, series.metric));
        if series.value.is_some() {
            return Err(fault("has one sample only: ask for a range, at /api/v1/query_range").into());
        }
        if let Some(name) = series.metric.get("__name__").filter(|name| name.starts_with(IN_MIB)) {
            let what = format!("is in MiB: ask for bytes, as {name} * 1048576");
            return Err(fault(&what).into());
        }
        let find = |names: &[&str]| {
            names.iter().find_map(|name| series.metric.get_key_value(*name).filter(|(_, v)| !v.is_empty()))
        };
        let Some((label, pod)) = find(&self.pod) else {
            let what = format!(
                "has none of the labels {}: ask for series by pod, or name the label with --pod-label",
                self.pod.join(", ")
            );
            return Err(fault(&what).into());
        };
        let namespace = match label.as_str() {
            "exported_pod" => series.metric.get("exported_namespace"),
            _ => series.metric.get("namespace"),
        };
        let pod = namespace.map_or_else(|| pod.clone(), |namespace| format!("{namespace}/{pod}"));
        let device = find(&self.device).map_or("", |(_, device)| device);
        if !self.names.insert(format!("{pod}\0{device}").into_bytes()) {
            let what = "is of the same pod and device as one before it: add them up in the query, as \
                        sum by (namespace, pod, device) (...)";
            return Err(fault(what).into());
        }
        for (at, value) in &series.values {
            let milliseconds = seconds(at.to_string().as_bytes()).map_err(|what| fault(&what))?;
            let bytes = match value.as_bytes() {
                value if number::is_missing(value) => None,
                value => Some(number::whole(value).map_err(|misfit| fault(&unfit(value, misfit)))?),
            };
            let row = Row {
                pod: pod.as_bytes(),
                device: device.as_bytes(),
                milliseconds,
                bytes,
                labels: PodLabels::Metric(&series.metric),
                ..Row::default()
            };
            (self.each)(None, &row)?;
        }
        Ok(())
    }
}

fn unfit(value: &[u8], misfit: Misfit) -> String {
    let value = shown(value);
    match misfit {
        Misfit::Malformed => format!("holds {value}, which is no number: ask for bytes"),
        Misfit::Negative => {
            format!("holds {value}, below 0: ask for bytes in use, not for a rate or difference")
        }
        Misfit::TooLarge => format!("holds {value}, which cannot be bytes"),
    }
}

fn unreadable(error: serde_json::Error) -> Fault {
    let (line, column) = (error.line(), error.column());
    if error.is_io() {
        return Fault::of_file(broken(&error.into()));
    }
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or_default();
    let line = u64::try_from(line).unwrap_or(u64::MAX);
    Fault::at(line, format!("character {column}: {text}: save what /api/v1/query_range answers, whole"))
}

/// The whole answer.
struct Answer<'w, 'a>(&'w mut Walk<'a>);

impl<'de> DeserializeSeed<'de> for Answer<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Answer<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with status and data")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "status" => self.0.status = Some(map.next_value()?),
                "error" => self.0.error = Some(map.next_value()?),
                "data" => map.next_value_seed(Data(&mut *self.0))?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

/// Its `data`.
struct Data<'w, 'a>(&'w mut Walk<'a>);

impl<'de> DeserializeSeed<'de> for Data<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Data<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with resultType and result")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "resultType" => self.0.kind = Some(map.next_value()?),
                "result" => map.next_value_seed(Matrix(&mut *self.0))?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

/// Its `data.result`.
struct Matrix<'w, 'a>(&'w mut Walk<'a>);

impl<'de> DeserializeSeed<'de> for Matrix<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Matrix<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of series")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        self.0.seen = true;
        while let Some(series) = list.next_element::<Series>()? {
            if let Err(stopped) = self.0.series(&series) {
                self.0.stopped = Some(stopped);
                return Err(A::Error::custom("given up"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Read = (String, u64, Option<u64>);

    fn rows_by(labels: &Labels, text: &str) -> Result<Vec<Read>, String> {
        let mut rows = Vec::new();
        let read = read(text.as_bytes(), labels, &mut |_, row| {
            let name =
                format!("{}@{}", String::from_utf8_lossy(row.pod), String::from_utf8_lossy(row.device));
            rows.push((name, row.milliseconds, row.bytes));
            Ok(())
        });
        read.map(|()| rows).map_err(|stop| stop.to_string())
    }

    fn rows(text: &str) -> Result<Vec<Read>, String> {
        rows_by(&Labels::default(), text)
    }

    fn answer(result: &str) -> String {
        format!(r#"{{"status":"success","data":{{"resultType":"matrix","result":[{result}]}}}}"#)
    }

    #[test]
    fn every_series_becomes_a_pod_on_a_device() {
        let text = answer(
            r#"{"metric":{"__name__":"highwater_pod_memory_used_bytes","namespace":"llm","pod":"a","device":"1"},
                "values":[[1767225600.057,"17179869184"],[1767225610,"NaN"]]},
               {"metric":{"exported_namespace":"llm","exported_pod":"b","namespace":"gpu","pod":"exporter-x","gpu":"0"},
                "values":[[5,"1.5e9"]]}"#,
        );
        assert_eq!(
            rows(&text).unwrap(),
            [
                ("llm/a@1".to_owned(), 1_767_225_600_057, Some(17_179_869_184)),
                ("llm/a@1".to_owned(), 1_767_225_610_000, None),
                ("llm/b@0".to_owned(), 5000, Some(1_500_000_000)),
            ]
        );
    }

    #[test]
    fn labels_can_be_named() {
        let labels =
            Labels { pod: Some("workload".to_owned()), device: Some("slot".to_owned()), ..Labels::default() };
        let text = answer(r#"{"metric":{"workload":"w","slot":"3","pod":"p"},"values":[[1,"2"]]}"#);
        assert_eq!(rows_by(&labels, &text).unwrap(), [("w@3".to_owned(), 1000, Some(2))]);
    }

    #[test]
    fn what_is_no_range_says_how_to_ask_for_one() {
        for (text, expected) in [
            (
                answer(r#"{"metric":{"pod":"a"},"value":[1,"2"]}"#),
                "series 1 {\"pod\": \"a\"}: has one sample only",
            ),
            (
                answer(r#"{"metric":{"job":"x"},"values":[[1,"2"]]}"#),
                "series 1 {\"job\": \"x\"}: has none of the labels",
            ),
            (
                answer(r#"{"metric":{"pod":"a"},"values":[]},{"metric":{"pod":"a","x":"1"},"values":[]}"#),
                "series 2 {\"pod\": \"a\", \"x\": \"1\"}: is of the same pod and device as one before it",
            ),
            (
                answer(r#"{"metric":{"__name__":"DCGM_FI_DEV_FB_USED","pod":"a"},"values":[[1,"2"]]}"#),
                "series 1 {\"__name__\": \"DCGM_FI_DEV_FB_USED\", \"pod\": \"a\"}: is in MiB",
            ),
            (
                answer(r#"{"metric":{"pod":"a"},"values":[[1,"-2"]]}"#),
                "series 1 {\"pod\": \"a\"}: holds \"-2\", below 0",
            ),
            (
                answer(r#"{"metric":{"pod":"a"},"values":[[-1,"2"]]}"#),
                "series 1 {\"pod\": \"a\"}: column seconds",
            ),
            (
                r#"{"status":"error","errorType":"timeout","error":"query timed out"}"#.to_owned(),
                "Prometheus refused the query: query timed out",
            ),
            (r#"{"status":"success"}"#.to_owned(), "holds no data.result"),
            (
                r#"{"data":{"resultType":"vector","result":[]}}"#.to_owned(),
                "is of the type vector: ask for a range",
            ),
            ("pod,device\n".to_owned(), "line 1: character 1: expected"),
            (answer(r#"{"metric":{"pod":"a"},"values":[[1,"2"]"#), "line 1: character"),
            (String::new(), "line 1: character 0: EOF"),
        ] {
            let error = rows(&text).unwrap_err();
            assert!(error.starts_with(expected), "{text}\n{error}");
        }
    }

    #[test]
    fn an_answer_without_series_is_an_answer() {
        assert_eq!(rows(&answer("")).unwrap(), []);
    }
}
