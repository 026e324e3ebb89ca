//! Where a registry's images are fetched from: mirrors, other locations and insecure registries, as `registries.conf` says.
//!
//! The file is that of podman, skopeo and CRI-O (`containers-registries.conf(5)`, version 2); of it are read `[[registry]]` with
//! `prefix`, `location`, `insecure`, `blocked` and `[[registry.mirror]]` with `location`, `insecure`, `pull-from-mirror`.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::Reference;
use crate::images::{Error, Result};

/// The host that serves `docker.io`.
const DOCKER_HUB: (&str, &str) = ("docker.io", "registry-1.docker.io");
/// Where the file lies unless the command line or `CONTAINERS_REGISTRIES_CONF` says so.
const USUAL_FILE: &str = "/etc/containers/registries.conf";

/// One place to fetch an image from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// `HOST[:PORT]` that is connected to.
    pub host: String,
    pub repository: String,
    /// Certificates are not checked, and plain HTTP will do.
    pub insecure: bool,
    /// The name that credentials are kept under.
    pub account: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    registry: Vec<Entry>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Entry {
    prefix: Option<String>,
    location: Option<String>,
    insecure: bool,
    blocked: bool,
    mirror: Vec<Mirror>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Mirror {
    location: String,
    #[serde(default)]
    insecure: bool,
    #[serde(default)]
    pull_from_mirror: Use,
}

#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Use {
    #[default]
    All,
    DigestOnly,
    TagOnly,
}

/// The places to try for `reference`, in order. `file`: the one that was given; None: the usual one, if there is one.
pub fn endpoints(reference: &Reference, file: Option<&Path>) -> Result<Vec<Endpoint>> {
    let path = match file {
        Some(path) => Some(path.to_owned()),
        None => std::env::var_os("CONTAINERS_REGISTRIES_CONF").map(PathBuf::from),
    };
    let text = match &path {
        Some(path) => fs::read_to_string(path).map_err(|source| Error::Unreadable { path: path.clone(), source })?,
        None => fs::read_to_string(USUAL_FILE).unwrap_or_default(),
    };
    let label = path.unwrap_or_else(|| USUAL_FILE.into());
    resolve(reference, &text, &label.to_string_lossy())
}

fn resolve(reference: &Reference, text: &str, label: &str) -> Result<Vec<Endpoint>> {
    let file: File = toml::from_str(text)
        .map_err(|error| Error::malformed(label, "registries.conf, version 2 (TOML)", error.to_string()))?;
    let name = format!("{}/{}", reference.registry(), reference.repository());
    let fitting = file.registry.iter().filter_map(|entry| Some((entry, matched(entry, reference, &name)?)));
    let Some((entry, prefix_len)) = fitting.max_by_key(|(_, len)| *len) else {
        return Ok(vec![endpoint(&name, false)]);
    };
    if entry.blocked {
        let reason = format!("{name}: {label} blocks this registry");
        return Err(Error::InvalidArgument { reason });
    }
    let at = |location: &str| format!("{}{}", location.trim_end_matches('/'), &name[prefix_len..]);
    let used = |mirror: &&Mirror| match mirror.pull_from_mirror {
        Use::All => true,
        Use::DigestOnly => reference.digest().is_some(),
        Use::TagOnly => reference.digest().is_none(),
    };
    let mut places: Vec<Endpoint> =
        entry.mirror.iter().filter(used).map(|mirror| endpoint(&at(&mirror.location), mirror.insecure)).collect();
    let own = entry.location.as_ref().map_or_else(|| name.clone(), |location| at(location));
    places.push(endpoint(&own, entry.insecure));
    Ok(places)
}

/// How much of the name an entry covers, if it is about it at all.
fn matched(entry: &Entry, reference: &Reference, name: &str) -> Option<usize> {
    let prefix = entry.prefix.as_ref().or(entry.location.as_ref())?.trim_end_matches('/');
    if let Some(domain) = prefix.strip_prefix('*') {
        return reference.registry().ends_with(domain).then(|| reference.registry().len());
    }
    let rest = name.strip_prefix(prefix)?;
    (rest.is_empty() || rest.starts_with('/')).then_some(prefix.len())
}

fn endpoint(name: &str, insecure: bool) -> Endpoint {
    let (registry, repository) = name.split_once('/').unwrap_or((name, ""));
    let host = if registry == DOCKER_HUB.0 { DOCKER_HUB.1 } else { registry };
    Endpoint {
        insecure: insecure || is_loopback(host),
        host: host.to_owned(),
        repository: repository.to_owned(),
        account: registry.to_owned(),
    }
}

/// What never leaves the machine needs no certificate, as with Docker.
fn is_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    name == "localhost" || name.trim_matches(['[', ']']).parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(name: &str, text: &str) -> Vec<String> {
        let reference = Reference::parse(name).unwrap();
        let places = resolve(&reference, text, "f").unwrap();
        places
            .iter()
            .map(|place| format!("{}/{}{}", place.host, place.repository, if place.insecure { " !" } else { "" }))
            .collect()
    }

    const FILE: &str = r#"
        unqualified-search-registries = ["x.example"]
        [[registry]]
        prefix = "docker.io"
        location = "docker.io"
        [[registry.mirror]]
        location = "mirror.example:5000/hub"
        insecure = true
        [[registry.mirror]]
        location = "digests.example"
        pull-from-mirror = "digest-only"
        [[registry]]
        prefix = "old.example/team"
        location = "new.example/group"
        [[registry]]
        prefix = "*.lab.example"
        insecure = true
        [[registry]]
        location = "bad.example"
        blocked = true
    "#;

    #[test]
    fn mirrors_come_first() {
        assert_eq!(
            hosts("python:3", FILE),
            ["mirror.example:5000/hub/library/python !", "registry-1.docker.io/library/python"]
        );
        let pinned = format!("python@sha256:{}", "a".repeat(64));
        assert_eq!(hosts(&pinned, FILE)[1], "digests.example/library/python");
        assert_eq!(hosts("python:3", ""), ["registry-1.docker.io/library/python"]);
    }

    #[test]
    fn prefixes_are_whole_parts() {
        assert_eq!(hosts("old.example/team/x:1", FILE), ["new.example/group/x"]);
        assert_eq!(hosts("old.example/teams/x:1", FILE), ["old.example/teams/x"]);
        assert_eq!(hosts("a.lab.example/x", FILE), ["a.lab.example/x !"]);
        let blocked = resolve(&Reference::parse("bad.example/x").unwrap(), FILE, "f").unwrap_err();
        assert!(blocked.to_string().contains("blocks"), "{blocked}");
        assert!(resolve(&Reference::parse("x").unwrap(), "[[registry]", "the file").is_err());
    }

    #[test]
    fn loopback_needs_no_certificate() {
        for (host, expected) in
            [("localhost:1", true), ("127.0.0.1:5000", true), ("[::1]:5000", true), ("10.0.0.1:5000", false)]
        {
            assert_eq!(is_loopback(host), expected, "{host}");
        }
    }
}
