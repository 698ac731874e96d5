//! The lines of a file and the fields of a line.
//!
//! A field that is quoted ends in its line. So a quote too many spoils one line, and does not make
//! the rest of a large file into one field.

use std::{
    io::{self, BufRead, Read},
    ops::Range,
};

use csv::{ByteRecord, ReaderBuilder};

use super::{Fault, source::broken};

/// No line that means anything is longer, in bytes.
const LONGEST: u64 = 1 << 16;

/// Reads line by line.
#[derive(Debug)]
pub(super) struct Lines<R> {
    reader: R,
    number: u64,
    line: Vec<u8>,
    /// Where the fields of a line without quotes are.
    plain: Vec<Range<usize>>,
    quoted: ByteRecord,
}

/// The fields of a line.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fields<'a> {
    /// Of one without quotes.
    Plain(&'a [u8], &'a [Range<usize>]),
    /// Of one with quotes.
    Quoted(&'a ByteRecord),
}

impl<'a> Fields<'a> {
    pub(super) fn len(self) -> usize {
        match self {
            Self::Plain(_, ranges) => ranges.len(),
            Self::Quoted(record) => record.len(),
        }
    }

    /// A field without the spaces around it; empty where there is none.
    pub(super) fn get(self, at: usize) -> &'a [u8] {
        let field = match self {
            Self::Plain(line, ranges) => ranges.get(at).and_then(|range| line.get(range.clone())),
            Self::Quoted(record) => record.get(at),
        };
        field.unwrap_or_default().trim_ascii()
    }
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(reader: R) -> Self {
        Self { reader, number: 0, line: Vec::new(), plain: Vec::new(), quoted: ByteRecord::new() }
    }

    /// The number of the next line that is not empty, from 1, and its fields; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<(u64, Fields<'_>)>, Fault> {
        loop {
            self.line.clear();
            self.number += 1;
            let fault = |error: &io::Error| Fault::at(self.number, broken(error));
            let read = self.reader.by_ref().take(LONGEST).read_until(b'\n', &mut self.line);
            if read.map_err(|error| fault(&error))? == 0 {
                return Ok(None);
            }
            match self.line.last() {
                Some(b'\n') => drop(self.line.pop()),
                _ if self.line.len() >= usize::try_from(LONGEST).unwrap_or(usize::MAX) => {
                    return Err(Fault::at(self.number, "is too long to be a sample: is this a text file?"));
                }
                _ => {}
            }
            if self.line.last() == Some(&b'\r') {
                self.line.pop();
            }
            if self.number == 1 && self.line.starts_with("\u{feff}".as_bytes()) {
                self.line.drain(..'\u{feff}'.len_utf8());
            }
            if !self.line.is_empty() {
                break;
            }
        }
        let number = self.number;
        let fields = if self.line.contains(&b'"') { self.quoted()? } else { self.plain() };
        Ok(Some((number, fields)))
    }

    fn plain(&mut self) -> Fields<'_> {
        self.plain.clear();
        let mut start = 0;
        for (at, byte) in self.line.iter().enumerate() {
            if *byte == b',' {
                self.plain.push(start..at);
                start = at + 1;
            }
        }
        self.plain.push(start..self.line.len());
        Fields::Plain(&self.line, &self.plain)
    }

    fn quoted(&mut self) -> Result<Fields<'_>, Fault> {
        // An even number of quotes cuts the line into an odd number of pieces.
        let pieces = self.line.split(|byte| *byte == b'"').count();
        if pieces.is_multiple_of(2) {
            return Err(Fault::at(
                self.number,
                "a quote is not closed: close it in the same line, or remove it",
            ));
        }
        let mut reader = ReaderBuilder::new().has_headers(false).from_reader(self.line.as_slice());
        let number = self.number;
        reader.read_byte_record(&mut self.quoted).map_err(|error| Fault::at(number, error.to_string()))?;
        Ok(Fields::Quoted(&self.quoted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number and fields of each line.
    fn lines(text: &[u8]) -> Result<Vec<(u64, Vec<String>)>, String> {
        let mut lines = Lines::new(text);
        let mut found = Vec::new();
        while let Some((number, fields)) = lines.next().map_err(|fault| fault.to_string())? {
            let text = |at| String::from_utf8_lossy(fields.get(at)).into_owned();
            found.push((number, (0..fields.len()).map(text).collect()));
        }
        Ok(found)
    }

    fn line(number: u64, fields: &[&str]) -> (u64, Vec<String>) {
        (number, fields.iter().map(|field| (*field).to_owned()).collect())
    }

    #[test]
    fn lines_are_counted_whatever_ends_them() {
        let text = "\u{feff}a, b ,c\r\n\r\n\n,x\nlast";
        assert_eq!(
            lines(text.as_bytes()).unwrap(),
            [line(1, &["a", "b", "c"]), line(4, &["", "x"]), line(5, &["last"])]
        );
    }

    #[test]
    fn quotes_keep_commas_together_but_not_lines() {
        assert_eq!(
            lines(b"\"a,b\",\"say \"\"c\"\"\",d\n1,2,3\n").unwrap(),
            [line(1, &["a,b", "say \"c\"", "d"]), line(2, &["1", "2", "3"])]
        );
        assert!(lines(b"a\n\"b,c\nd\"\n").unwrap_err().starts_with("line 2: a quote is not closed"));
    }

    #[test]
    fn a_line_without_end_is_not_held() {
        assert!(lines(&vec![b'x'; 1 << 20]).unwrap_err().starts_with("line 1: is too long"));
    }
}
