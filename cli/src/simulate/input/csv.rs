//! Series as comma-separated values: a header, then one sample a row.

use std::io::BufRead;

use super::{
    Each, Fault, Labels, PodLabels, Row, Stop,
    lines::{Fields, Lines},
    number,
    number::Misfit,
    shown,
};

/// The columns that a file has to have, beside those that name pod and device,
const REQUIRED: [&str; 2] = ["seconds", "bytes"];
/// which are these where nobody says otherwise.
const NAMES: [&str; 2] = ["pod", "device"];
/// Those that it may have.
const OPTIONAL: [&str; 4] = ["capacity", "work", "host_bytes", "life"];

/// A time beyond this is not in seconds; in milliseconds it is the year 1973.
const LATEST_SECONDS: u64 = 100_000_000_000;

/// Where the columns stand.
struct Columns {
    pod: usize,
    device: usize,
    seconds: usize,
    bytes: usize,
    capacity: Option<usize>,
    work: Option<usize>,
    host_bytes: Option<usize>,
    life: Option<usize>,
    /// Labels of pods, by the names that are asked for.
    labels: Vec<(String, usize)>,
    /// What the column is called that names the pod.
    pod_name: String,
    count: usize,
}

/// Reads a file and hands on each row with its line. Returns what is to be said of it although it
/// could be read.
pub(crate) fn read(source: impl BufRead, labels: &Labels, each: &mut Each<'_>) -> Result<Vec<String>, Stop> {
    let mut lines = Lines::new(source);
    let Some((line, header)) = lines.next()? else {
        let required = required(labels).join(",");
        return Err(Fault::of_file(format!("is empty: its first line has to be {required}")).into());
    };
    let (columns, notes) = Columns::find(header, labels).map_err(|what| Fault::at(line, what))?;
    while let Some((line, fields)) = lines.next()? {
        let row = columns.row(fields).map_err(|what| Fault::at(line, what))?;
        each(Some(line), &row)?;
    }
    Ok(notes)
}

/// What the columns are called that a file has to have: pod and device first.
fn required(labels: &Labels) -> [&str; 4] {
    let [pod, device] = NAMES;
    let [seconds, bytes] = REQUIRED;
    [labels.pod.as_deref().unwrap_or(pod), labels.device.as_deref().unwrap_or(device), seconds, bytes]
}

impl Columns {
    /// The columns of a header, and what is to be said of it.
    fn find(header: Fields<'_>, labels: &Labels) -> Result<(Self, Vec<String>), String> {
        let all @ [pod, device, seconds, bytes] = required(labels);
        let name = |at| String::from_utf8_lossy(header.get(at)).to_lowercase();
        let names: Vec<String> = (0..header.len()).map(name).collect();
        let is = |have: &String, name: &str| *have == name.to_lowercase();
        let at = |name: &str| names.iter().position(|have| is(have, name));
        let asked = || labels.asked.iter().map(String::as_str);
        for name in all.into_iter().chain(OPTIONAL).chain(asked()) {
            if names.iter().filter(|have| is(have, name)).count() > 1 {
                return Err(format!("there are two columns {name}: keep one"));
            }
        }
        let needed = |name: &str| {
            at(name).ok_or_else(|| {
                format!(
                    "there is no column {name} among {}: name the columns {} (and, where known, {})",
                    shown(names.join(",").as_bytes()),
                    all.join(","),
                    OPTIONAL.join(",")
                )
            })
        };
        let known = |name: &String| {
            let mut known = all.into_iter().chain(OPTIONAL).chain(asked());
            known.any(|known| is(name, known))
        };
        let notes = names
            .iter()
            .filter(|name| !known(name))
            .map(|name| format!("column {} is not read: it has no meaning here", shown(name.as_bytes())))
            .collect();
        let columns = Self {
            pod: needed(pod)?,
            device: needed(device)?,
            seconds: needed(seconds)?,
            bytes: needed(bytes)?,
            capacity: at("capacity"),
            work: at("work"),
            host_bytes: at("host_bytes"),
            life: at("life"),
            labels: asked().filter_map(|name| at(name).map(|at| (name.to_owned(), at))).collect(),
            pod_name: pod.to_owned(),
            count: names.len(),
        };
        Ok((columns, notes))
    }

    /// A row, or what is wrong with it.
    fn row<'a>(&'a self, fields: Fields<'a>) -> Result<Row<'a>, String> {
        if fields.len() != self.count {
            return Err(format!(
                "there are {} fields where the first line names {}: a comma too many or too few, or the line is cut",
                fields.len(),
                self.count
            ));
        }
        let optional =
            |at: Option<usize>| at.map(|at| fields.get(at)).filter(|text| !number::is_missing(text));
        let whole = |name: &str, text: &[u8]| {
            number::whole(text).map_err(|misfit| unfit(name, text, misfit, "a whole number of bytes"))
        };
        let bytes = optional(Some(self.bytes)).map(|text| whole("bytes", text)).transpose()?;
        let capacity = optional(self.capacity).map(|text| whole("capacity", text)).transpose()?;
        if capacity == Some(0) {
            return Err("column capacity is 0: leave it empty where it is not known".to_owned());
        }
        let row = Row {
            pod: fields.get(self.pod),
            device: fields.get(self.device),
            milliseconds: seconds(fields.get(self.seconds))?,
            bytes,
            capacity,
            work: optional(self.work).map(work).transpose()?,
            host_bytes: optional(self.host_bytes).map(|text| whole("host_bytes", text)).transpose()?,
            life: optional(self.life).map(life).transpose()?,
            labels: PodLabels::Columns(&self.labels, fields),
        };
        if row.pod.is_empty() {
            return Err(format!("column {} is empty: every row needs a pod", self.pod_name));
        }
        Ok(row)
    }
}

/// A time in milliseconds.
pub(super) fn seconds(text: &[u8]) -> Result<u64, String> {
    if number::is_missing(text) {
        return Err("column seconds is empty: every row needs a time".to_owned());
    }
    let milliseconds = number::thousandths(text).map_err(|misfit| match misfit {
        Misfit::Malformed => {
            format!("column seconds is {}: write seconds since any moment, as a number", shown(text))
        }
        Misfit::Negative => {
            format!("column seconds is {}, below 0: count from a moment before the first row", shown(text))
        }
        Misfit::TooLarge => unfit("seconds", text, misfit, "seconds since any moment"),
    })?;
    if milliseconds / 1000 > LATEST_SECONDS {
        return Err(format!("column seconds is {}: give seconds, not milliseconds or less", shown(text)));
    }
    Ok(milliseconds)
}

fn work(text: &[u8]) -> Result<f64, String> {
    let malformed = || format!("column work is {}: write a number, or leave it empty", shown(text));
    let value: f64 = std::str::from_utf8(text).ok().and_then(|t| t.parse().ok()).ok_or_else(malformed)?;
    if value.is_finite() && value >= 0.0 {
        Ok(value)
    } else {
        Err(format!("column work is {}: write a count of at least 0, or leave it empty", shown(text)))
    }
}

fn life(text: &[u8]) -> Result<i64, String> {
    number::signed(text).ok_or_else(|| {
        format!("column life is {}: write an integer that changes when the pod is started anew", shown(text))
    })
}

/// What to say of a number that is none.
pub(super) fn unfit(name: &str, text: &[u8], misfit: Misfit, wanted: &str) -> String {
    let text = shown(text);
    match misfit {
        Misfit::Malformed => {
            format!("column {name} is {text}: write {wanted}, or leave it empty where it is missing")
        }
        Misfit::Negative => {
            format!("column {name} is {text}, below 0: leave it empty where it is missing")
        }
        Misfit::TooLarge => format!("column {name} is {text}: that cannot be {wanted}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Read = (Option<u64>, String, u64, Option<u64>, Option<i64>);

    /// Line, pod and device, milliseconds, bytes and life of each row; the notes; or the fault.
    fn rows(text: &str) -> Result<(Vec<Read>, Vec<String>), String> {
        rows_by(&Labels::default(), text)
    }

    fn rows_by(labels: &Labels, text: &str) -> Result<(Vec<Read>, Vec<String>), String> {
        let mut rows = Vec::new();
        let notes = read(text.as_bytes(), labels, &mut |line, row| {
            let name =
                format!("{}@{}", String::from_utf8_lossy(row.pod), String::from_utf8_lossy(row.device));
            rows.push((line, name, row.milliseconds, row.bytes, row.life));
            Ok(())
        });
        notes.map(|notes| (rows, notes)).map_err(|stop| stop.to_string())
    }

    fn fault(text: &str) -> String {
        rows(text).unwrap_err()
    }

    #[test]
    fn columns_are_found_by_name_in_any_order() {
        let text = "\u{feff}bytes, Seconds,device,pod,extra\r\n5,1.5,gpu0,a,x\r\n\r\n,2,gpu0,\"b,c\",y\r\n";
        let (rows, notes) = rows(text).unwrap();
        assert_eq!(
            rows,
            [
                (Some(2), "a@gpu0".to_owned(), 1500, Some(5), None),
                (Some(4), "b,c@gpu0".to_owned(), 2000, None, None)
            ]
        );
        assert_eq!(notes, ["column \"extra\" is not read: it has no meaning here"]);
    }

    #[test]
    fn pod_and_device_may_stand_in_columns_of_other_names() {
        let labels =
            Labels { pod: Some("Server".to_owned()), device: Some("gpu".to_owned()), asked: Vec::new() };
        let (rows, notes) = rows_by(&labels, "pod,server,gpu,seconds,bytes\nx,a,3,1,5\n").unwrap();
        assert_eq!(rows, [(Some(2), "a@3".to_owned(), 1000, Some(5), None)]);
        assert_eq!(notes, ["column \"pod\" is not read: it has no meaning here"]);
        let fault = |text| rows_by(&labels, text).unwrap_err();
        assert!(fault("").contains("its first line has to be Server,gpu,seconds,bytes"));
        let error = fault("pod,device,seconds,bytes\n");
        assert!(error.starts_with("line 1: there is no column Server among"), "{error}");
        assert!(fault("server,gpu,seconds,bytes\n,3,1,5\n").starts_with("line 2: column Server is empty"));
    }

    #[test]
    fn labels_that_are_asked_for_stand_in_columns_of_their_names() {
        let labels = Labels { asked: vec!["Tier".to_owned(), "app".to_owned()], ..Labels::default() };
        let mut found = Vec::new();
        let text = "pod,device,seconds,bytes,tier,extra\na,0,1,5,serving,x\na,0,2,5,,x\n";
        let notes = read(text.as_bytes(), &labels, &mut |_, row| {
            found.push((row.labels.get("Tier"), row.labels.get("app"), row.labels.get("extra")));
            Ok(())
        });
        let serving = |text: &str| Some(text.to_owned());
        assert_eq!(found, [(serving("serving"), None, None), (serving(""), None, None)]);
        assert_eq!(notes.unwrap(), ["column \"extra\" is not read: it has no meaning here"]);
        let twice = "pod,device,seconds,bytes,tier,tier\n";
        assert!(rows_by(&labels, twice).unwrap_err().contains("there are two columns Tier"));
    }

    #[test]
    fn a_missing_number_is_not_zero() {
        let text = "pod,device,seconds,bytes,capacity,work,host_bytes,life\na,0,1,NaN,,,nan,\n";
        let mut found = None;
        read(text.as_bytes(), &Labels::default(), &mut |_, row| {
            found = Some((row.bytes, row.capacity, row.work, row.host_bytes, row.life));
            Ok(())
        })
        .unwrap();
        assert_eq!(found, Some((None, None, None, None, None)));
    }

    #[test]
    fn a_header_that_does_not_do_says_what_is_wanted() {
        assert!(fault("").starts_with("is empty: its first line has to be pod,device,seconds,bytes"));
        let error = fault("pod,seconds,value\na,1,2\n");
        assert!(error.starts_with("line 1: there is no column device among"), "{error}");
        assert!(error.contains("pod,seconds,value") && error.contains("capacity,work,host_bytes,life"));
        assert!(fault("\npod;device\n").starts_with("line 2: there is no column pod"));
        assert!(fault("pod,device,seconds,bytes,bytes\n").starts_with("line 1: there are two columns bytes"));
    }

    #[test]
    fn a_row_that_does_not_do_is_named_by_its_line() {
        let header = "pod,device,seconds,bytes,capacity,work,host_bytes,life\n";
        for (row, expected) in [
            ("a,0,1", "there are 3 fields where the first line names 8"),
            ("a,0,,5,9,,,", "column seconds is empty"),
            ("a,0,yesterday,5,9,,,", "column seconds is \"yesterday\": write"),
            ("a,0,1767225600000,5,9,,,", "column seconds is \"1767225600000\": give seconds"),
            ("a,0,-1,5,9,,,", "column seconds is \"-1\", below 0"),
            ("a,0,1,5x,9,,,", "column bytes is \"5x\": write a whole number of bytes"),
            ("a,0,1,-5,9,,,", "column bytes is \"-5\", below 0: leave it empty"),
            ("a,0,1,inf,9,,,", "column bytes is \"inf\": that cannot be"),
            ("a,0,1,5,0,,,", "column capacity is 0: leave it empty"),
            ("a,0,1,5,9,-1,,", "column work is \"-1\""),
            ("a,0,1,5,9,many,,", "column work is \"many\""),
            ("a,0,1,5,9,,5 GiB,", "column host_bytes is \"5 GiB\""),
            ("a,0,1,5,9,,,1.5", "column life is \"1.5\""),
            (",0,1,5,9,,,", "column pod is empty: every row needs a pod"),
        ] {
            let error = fault(&format!("{header}ok,0,1,5,9,,,\n{row}\n"));
            assert!(error.starts_with(&format!("line 3: {expected}")), "{row}: {error}");
        }
    }

    #[test]
    fn a_long_text_is_cut_in_the_message() {
        let error = fault(&format!("pod,device,seconds,bytes\na,0,1,{}\n", "9x".repeat(5000)));
        assert!(error.len() < 200, "{error}");
    }
}
