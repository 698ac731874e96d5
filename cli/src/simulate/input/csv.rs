//! Series as comma-separated values: a header, then one sample a row.

use std::io::BufRead;

use super::{
    Each, Fault, Row, Stop,
    lines::{Fields, Lines},
    number,
    number::Misfit,
    shown,
};

/// The columns that a file has to have.
const REQUIRED: [&str; 4] = ["pod", "device", "seconds", "bytes"];
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
    count: usize,
}

/// Reads a file and hands on each row with its line. Returns what is to be said of it although it
/// could be read.
pub(crate) fn read(source: impl BufRead, each: &mut Each<'_>) -> Result<Vec<String>, Stop> {
    let mut lines = Lines::new(source);
    let Some((line, header)) = lines.next()? else {
        return Err(
            Fault::of_file(format!("is empty: its first line has to be {}", REQUIRED.join(","))).into()
        );
    };
    let (columns, notes) = Columns::find(header).map_err(|what| Fault::at(line, what))?;
    while let Some((line, fields)) = lines.next()? {
        let row = columns.row(fields).map_err(|what| Fault::at(line, what))?;
        each(Some(line), &row)?;
    }
    Ok(notes)
}

impl Columns {
    /// The columns of a header, and what is to be said of it.
    fn find(header: Fields<'_>) -> Result<(Self, Vec<String>), String> {
        let name = |at| String::from_utf8_lossy(header.get(at)).to_lowercase();
        let names: Vec<String> = (0..header.len()).map(name).collect();
        let at = |name: &str| names.iter().position(|have| have == name);
        for name in REQUIRED.into_iter().chain(OPTIONAL) {
            if names.iter().filter(|have| *have == name).count() > 1 {
                return Err(format!("there are two columns {name}: keep one"));
            }
        }
        let required = |name: &str| {
            at(name).ok_or_else(|| {
                format!(
                    "there is no column {name} among {}: name the columns {} (and, where known, {})",
                    shown(names.join(",").as_bytes()),
                    REQUIRED.join(","),
                    OPTIONAL.join(",")
                )
            })
        };
        let unknown =
            |name: &&String| !REQUIRED.contains(&name.as_str()) && !OPTIONAL.contains(&name.as_str());
        let notes = names
            .iter()
            .filter(unknown)
            .map(|name| format!("column {} is not read: it has no meaning here", shown(name.as_bytes())))
            .collect();
        let columns = Self {
            pod: required("pod")?,
            device: required("device")?,
            seconds: required("seconds")?,
            bytes: required("bytes")?,
            capacity: at("capacity"),
            work: at("work"),
            host_bytes: at("host_bytes"),
            life: at("life"),
            count: names.len(),
        };
        Ok((columns, notes))
    }

    /// A row, or what is wrong with it.
    fn row<'a>(&self, fields: Fields<'a>) -> Result<Row<'a>, String> {
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
        };
        if row.pod.is_empty() {
            return Err("column pod is empty: every row needs one".to_owned());
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
        let mut rows = Vec::new();
        let notes = read(text.as_bytes(), &mut |line, row| {
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
    fn a_missing_number_is_not_zero() {
        let text = "pod,device,seconds,bytes,capacity,work,host_bytes,life\na,0,1,NaN,,,nan,\n";
        let mut found = None;
        read(text.as_bytes(), &mut |_, row| {
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
            (",0,1,5,9,,,", "column pod is empty"),
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
