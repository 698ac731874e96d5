//! Files that a later agent goes on with: whoever reads one finds it whole, the new or the old.

use std::{
    fs::{self, File},
    io::{self, BufWriter},
    path::Path,
};

/// Has `write` write the file anew. Once this returns it outlives the agent.
///
/// There must be one writer of a file at a time: what is not finished has one name.
///
/// # Errors
/// Fails when it cannot be written; what was there before stands.
pub(crate) fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    let unfinished = path.with_extension("unfinished");
    // What another agent left half-way is cut off.
    let mut file = BufWriter::new(File::create(&unfinished)?);
    write(&mut file)?;
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    fs::rename(&unfinished, path)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_cannot_be_written_leaves_what_was_there_and_is_written_over_later() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.state");
        replace(&path, |file| file.write_all(b"old")).unwrap();
        // As far as an agent comes that is killed before the file has its name.
        let cut_off = replace(&path, |file| {
            file.write_all(b"longer than all that follows")?;
            file.flush()?;
            Err(io::Error::other("killed"))
        });
        assert!(cut_off.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert!(directory.path().join("a.unfinished").exists());
        replace(&path, |file| file.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(!directory.path().join("a.unfinished").exists());
    }
}
