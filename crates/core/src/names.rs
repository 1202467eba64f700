//! Names of things in the cluster, one type each, so that a node is never taken for a pod or a revision.
//!
//! They are cheap to clone (shared text), ordered, and print as they were written.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }
        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text.into())
            }
        }
        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

name_type!(
    /// A node.
    NodeName
);
name_type!(
    /// A driver, as it appears in label keys: `gpu`, `ofed`, …
    DriverName
);
name_type!(
    /// A pool: one policy's share of the fleet. Named after the object that states the policy.
    PoolName
);
name_type!(
    /// A gate, as the policy names it.
    GateName
);
name_type!(
    /// The UID of an object: the one name that is never used twice.
    Uid
);
name_type!(
    /// An entry of the version matrix: `current`, `canary`, …
    EntryName
);
name_type!(
    /// A DaemonSet template revision, the value of `controller-revision-hash`.
    RevisionHash
);

/// A namespaced object's name, printed as `namespace/name`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ObjectName {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name in there.
    pub name: Arc<str>,
}

impl ObjectName {
    /// `namespace/name`.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl From<ObjectName> for String {
    fn from(name: ObjectName) -> Self {
        name.to_string()
    }
}

impl TryFrom<String> for ObjectName {
    type Error = &'static str;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        let (namespace, name) = text.split_once('/').ok_or("a name is namespace/name")?;
        Ok(Self::new(namespace, name))
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// An object's version. Kubernetes guarantees a decimal integer that grows with every write to that kind.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ResourceVersion(u64);

impl ResourceVersion {
    /// Reads what the API sent; `None` if it is no decimal integer.
    pub fn parse(text: &str) -> Option<Self> {
        text.parse().ok().map(Self)
    }

    /// A number from 0 to 255 that differs from version to version: for waits that should not all end together.
    pub fn spread(self) -> u8 {
        self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0]
    }
}

impl From<u64> for ResourceVersion {
    fn from(number: u64) -> Self {
        Self(number)
    }
}

impl fmt::Display for ResourceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
