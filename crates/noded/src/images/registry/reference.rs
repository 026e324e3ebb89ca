//! Names of images in registries, as Docker reads them.

use std::fmt;

use oci_spec::distribution;

use crate::images::{Error, Result};

/// The registry of a name that says none.
const USUAL_REGISTRY: &str = "docker.io";
/// Where that registry keeps images whose name has one part.
const USUAL_FOLDER: &str = "library/";

/// One image in one registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference(distribution::Reference);

impl Reference {
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |why: String| Error::InvalidArgument {
            reason: format!("{text:?} is not a name in a registry, [HOST/]REPOSITORY[:TAG][@DIGEST]: {why}"),
        };
        let parsed: distribution::Reference =
            text.parse().map_err(|error: distribution::ParseError| wrong(error.to_string()))?;
        if parsed.repository().bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(wrong("a repository is written in lower case".to_owned()));
        }
        Ok(Self(parsed))
    }

    /// As it is written: `docker.io`, `ghcr.io`, `127.0.0.1:5000`.
    pub fn registry(&self) -> &str {
        self.0.registry()
    }

    pub fn repository(&self) -> &str {
        self.0.repository()
    }

    pub fn digest(&self) -> Option<&str> {
        self.0.digest()
    }

    /// What is asked for: the digest where the name has one, else the tag.
    pub fn version(&self) -> &str {
        self.0.digest().or(self.0.tag()).unwrap_or("latest")
    }
}

/// The name as a person writes it: without the registry and folder that every name has unless it says others.
impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.registry(), self.repository().strip_prefix(USUAL_FOLDER)) {
            (USUAL_REGISTRY, Some(short)) => f.write_str(short)?,
            (USUAL_REGISTRY, None) => f.write_str(self.repository())?,
            (registry, _) => write!(f, "{registry}/{}", self.repository())?,
        }
        if let Some(tag) = self.0.tag() {
            write!(f, ":{tag}")?;
        }
        self.digest().map_or(Ok(()), |digest| write!(f, "@{digest}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_docker_s() {
        let digest = format!("sha256:{}", "a".repeat(64));
        for (text, registry, repository, version, shown) in [
            ("python", "docker.io", "library/python", "latest", "python:latest"),
            ("docker.io/library/python:3.12", "docker.io", "library/python", "3.12", "python:3.12"),
            ("someone/thing:1", "docker.io", "someone/thing", "1", "someone/thing:1"),
            ("127.0.0.1:5000/a/b:x", "127.0.0.1:5000", "a/b", "x", "127.0.0.1:5000/a/b:x"),
            ("localhost/a", "localhost", "a", "latest", "localhost/a:latest"),
            (&format!("ghcr.io/o/r@{digest}"), "ghcr.io", "o/r", digest.as_str(), &format!("ghcr.io/o/r@{digest}")),
        ] {
            let reference = Reference::parse(text).unwrap();
            assert_eq!(
                (reference.registry(), reference.repository(), reference.version()),
                (registry, repository, version)
            );
            assert_eq!(reference.to_string(), shown);
            assert_eq!(Reference::parse(shown).unwrap(), reference);
        }
        for bad in ["", "A/b", "a b", "a:b:c/d", "x@sha256:12", "../x"] {
            assert!(Reference::parse(bad).is_err(), "{bad}");
        }
    }
}
