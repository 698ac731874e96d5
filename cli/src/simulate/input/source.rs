//! The bytes of a file, unpacked where it is packed, and how many of them have been read.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use flate2::bufread::MultiGzDecoder;

use super::Fault;

/// The first bytes of what gzip packed.
const GZIP: [u8; 2] = [0x1f, 0x8b];

const BUFFER: usize = 1 << 18;

/// How far a file has been read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    read: Arc<AtomicU64>,
    /// Size of the file, where it has one.
    total: Option<u64>,
}

impl Tally {
    /// Whole percent of the file; `None` of a pipe.
    pub(crate) fn percent(&self) -> Option<u64> {
        let read = u128::from(self.read.load(Ordering::Relaxed));
        let total = u128::from(self.total.filter(|total| *total > 0)?);
        u64::try_from(read * 100 / total).ok().map(|percent| percent.min(100))
    }
}

/// The unpacked bytes of a file.
pub(crate) struct Source {
    reader: Box<dyn BufRead>,
    tally: Tally,
}

impl Source {
    /// Opens a file; `-` is what is piped in.
    pub(crate) fn open(path: &Path) -> Result<Self, Fault> {
        let fault = |error: io::Error| Fault::of_file(format!("cannot be read: {error}"));
        if path == Path::new("-") {
            return Self::new(io::stdin().lock(), None).map_err(fault);
        }
        let file = File::open(path).map_err(fault)?;
        let metadata = file.metadata().map_err(fault)?;
        if metadata.is_dir() {
            return Err(Fault::of_file("is a folder: name a file"));
        }
        Self::new(file, Some(metadata.len()).filter(|_| metadata.is_file())).map_err(fault)
    }

    /// Of any reader. Looks at its first bytes.
    pub(crate) fn new(reader: impl Read + 'static, total: Option<u64>) -> io::Result<Self> {
        let tally = Tally { total, ..Tally::default() };
        let counted = Counted { reader, read: Arc::clone(&tally.read) };
        let mut packed = BufReader::with_capacity(BUFFER, counted);
        let reader: Box<dyn BufRead> = if packed.fill_buf()?.starts_with(&GZIP) {
            Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(packed)))
        } else {
            Box::new(packed)
        };
        Ok(Self { reader, tally })
    }

    /// How far it has been read.
    pub(crate) fn tally(&self) -> Tally {
        self.tally.clone()
    }
}

impl Read for Source {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.reader.read(into)
    }
}

impl BufRead for Source {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.reader.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.reader.consume(count);
    }
}

/// What to say of a file that cannot be read on.
pub(super) fn broken(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the file ends in the middle: copy it anew".to_owned(),
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
            format!("the file is damaged: copy it anew ({error})")
        }
        _ => format!("cannot be read on: {error}"),
    }
}

struct Counted<R> {
    reader: R,
    read: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(into)?;
        self.read.fetch_add(u64::try_from(count).unwrap_or(u64::MAX), Ordering::Relaxed);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};

    use super::*;

    fn packed(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn what_is_packed_is_unpacked_whatever_its_name_and_in_several_pieces() {
        let bytes = [packed(b"one\n"), packed(b"two\n")].concat();
        let total = u64::try_from(bytes.len()).unwrap();
        let mut source = Source::new(io::Cursor::new(bytes), Some(total)).unwrap();
        let mut text = String::new();
        source.read_to_string(&mut text).unwrap();
        assert_eq!(text, "one\ntwo\n");
        assert_eq!(source.tally().percent(), Some(100));
    }

    #[test]
    fn an_empty_file_has_no_percentage() {
        let mut source = Source::new(io::Cursor::new(Vec::new()), Some(0)).unwrap();
        assert_eq!(source.read(&mut [0; 8]).unwrap(), 0);
        assert_eq!(source.tally().percent(), None);
    }
}
