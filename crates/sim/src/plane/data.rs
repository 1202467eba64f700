//! The directory with everything that a plane writes: kept where somebody asked for it, or temporary.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::PlaneError;

/// The directory with everything that a plane writes.
#[derive(Debug)]
pub(super) struct Data {
    pub(super) dir: PathBuf,
    pub(super) temporary: bool,
}

impl Data {
    /// Readable by its owner only: it holds tokens.
    pub(super) fn make(asked_for: Option<&Path>) -> Result<Data, PlaneError> {
        let made = match asked_for {
            Some(dir) => std::path::absolute(dir).and_then(|dir| {
                DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
                Ok(Data { dir, temporary: false })
            }),
            None => Data::make_temporary(),
        };
        let dir = || asked_for.map_or_else(std::env::temp_dir, Path::to_owned);
        made.map_err(|source| PlaneError::Prepare { dir: dir(), source })
    }

    fn make_temporary() -> io::Result<Data> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let dir = std::env::temp_dir().join(format!("pitcrew-plane-{}-{number}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&dir) {
                Ok(()) => return Ok(Data { dir, temporary: true }),
                // Left by an earlier process with our number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        if self.temporary {
            // The supervisors remove it too, for the case that we are killed; whoever is first is right.
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}
