//! Whether a driver version is listed, where the matrix is a file in a ConfigMap that may be missing or unreadable. An answer
//! is the entries that list it, or why nobody can say that any does.

use std::collections::BTreeMap;
use std::fmt;

use super::Matrix;
use crate::names::{EntryName, ObjectName};
use crate::version::DriverVersion;

/// A matrix is a page of text. What is larger is none, and is not read.
const FILE_BYTES_MAX: usize = 64 * 1024;

/// The files of a ConfigMap by their keys: matrices, or the sentence why one is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files(BTreeMap<Box<str>, Result<Matrix, Box<str>>>);

impl Files {
    /// Reads every file.
    pub fn read<'a>(files: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let read = |text: &str| {
            if text.len() > FILE_BYTES_MAX {
                let most = FILE_BYTES_MAX / 1024;
                return Err(format!("it has {} bytes; at most {most} KiB are read", text.len()).into());
            }
            Matrix::parse(text).map_err(|problems| problems.to_string().into())
        };
        Self(files.map(|(key, text)| (key.into(), read(text))).collect())
    }

    /// The file of this key, if there is one.
    pub fn get(&self, key: &str) -> Option<Result<&Matrix, &str>> {
        self.0.get(key).map(|file| file.as_ref().map_err(AsRef::as_ref))
    }
}

/// Where a matrix is in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The ConfigMap.
    pub config_map: ObjectName,
    /// The key in it.
    pub key: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "configmap/{}, key {}", self.config_map, self.key)
    }
}

/// A version of which nobody can say that it is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unlisted {
    /// Where the matrix is, or should be.
    pub place: Place,
    /// Why.
    pub why: WhyUnlisted,
}

/// Why nobody can say that a version is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WhyUnlisted {
    /// The ConfigMap is not there.
    NoConfigMap,
    /// It has no such key.
    NoKey,
    /// What is there is no matrix.
    Unreadable(String),
    /// The image does not tell its version.
    NoVersion {
        /// The DaemonSet.
        daemon_set: ObjectName,
    },
    /// It is in none of the entries.
    InNoEntry {
        /// The version.
        version: DriverVersion,
        /// The versions that are, each once.
        listed: Vec<DriverVersion>,
    },
}

impl Unlisted {
    /// The matrix was read, and says so. Otherwise it may yet say something else.
    pub fn is_certain(&self) -> bool {
        matches!(self.why, WhyUnlisted::InNoEntry { .. })
    }
}

impl fmt::Display for Unlisted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unlisted { place, why } = self;
        match why {
            WhyUnlisted::NoConfigMap => {
                write!(f, "there is no version matrix: configmap/{} is missing", place.config_map)
            }
            WhyUnlisted::NoKey => {
                write!(
                    f,
                    "there is no version matrix: configmap/{} has no key {}",
                    place.config_map, place.key
                )
            }
            WhyUnlisted::Unreadable(why) => write!(f, "the version matrix ({place}) cannot be read: {why}"),
            WhyUnlisted::NoVersion { daemon_set } => write!(
                f,
                "the image of daemonset/{daemon_set} has no version in its tag, so nobody can say whether the version matrix lists it"
            ),
            WhyUnlisted::InNoEntry { version, listed } => {
                let listed: Vec<String> = listed.iter().map(ToString::to_string).collect();
                let lists = if listed.is_empty() { "no driver".to_owned() } else { listed.join(", ") };
                write!(f, "driver {version} is not in the version matrix ({place}), which lists {lists}")
            }
        }
    }
}

/// The matrix at a key; `files` is `None` if there is no ConfigMap.
pub fn find<'f>(files: Option<&'f Files>, key: &str) -> Result<&'f Matrix, WhyUnlisted> {
    let files = files.ok_or(WhyUnlisted::NoConfigMap)?;
    let file = files.get(key).ok_or(WhyUnlisted::NoKey)?;
    file.map_err(|why| WhyUnlisted::Unreadable(why.to_owned()))
}

/// The entries that list the version which a DaemonSet installs.
pub fn listing<'m>(
    matrix: &'m Matrix,
    version: Option<&DriverVersion>,
    daemon_set: &ObjectName,
) -> Result<Vec<&'m EntryName>, WhyUnlisted> {
    let version = version.ok_or_else(|| WhyUnlisted::NoVersion { daemon_set: daemon_set.clone() })?;
    matrix.allows(version).ok_or_else(|| {
        let mut listed: Vec<DriverVersion> =
            matrix.entries.values().filter_map(|entry| entry.driver.clone()).collect();
        listed.sort();
        listed.dedup();
        WhyUnlisted::InNoEntry { version: version.clone(), listed }
    })
}
