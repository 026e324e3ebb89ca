//! The image configuration of OCI and Docker, as far as a sandbox obeys it.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::architecture;
use crate::images::{Error, ImageConfig, Result};

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Document {
    architecture: Option<String>,
    os: Option<String>,
    config: Option<Section>,
    rootfs: Option<RootFs>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Section {
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    user: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    volumes: Option<BTreeMap<String, serde_json::Value>>,
    labels: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RootFs {
    diff_ids: Vec<String>,
}

/// The configuration and the digests of the unpacked layers, bottom first.
pub fn parse(label: &str, text: &[u8]) -> Result<(ImageConfig, Vec<String>)> {
    let document: Document = serde_json::from_slice(text)
        .map_err(|error| Error::malformed(label, "an image configuration (JSON)", error.to_string()))?;
    let os = document.os.as_deref().filter(|os| !os.is_empty()).unwrap_or("linux");
    let arch = document.architecture.as_deref().filter(|arch| !arch.is_empty()).unwrap_or(architecture());
    if (os, arch) != ("linux", architecture()) {
        return Err(Error::malformed(
            label,
            format!("an image for linux/{}", architecture()),
            format!("one for {os}/{arch}"),
        ));
    }
    let diff_ids = document.rootfs.unwrap_or_default().diff_ids;
    let section = document.config.unwrap_or_default();
    let present = |text: Option<String>| text.filter(|text| !text.is_empty());
    let env = section.env.unwrap_or_default().into_iter().filter_map(|variable| {
        let (name, value) = variable.split_once('=')?;
        (!name.is_empty()).then(|| (name.to_owned(), value.to_owned()))
    });
    let config = ImageConfig {
        env: env.collect(),
        workdir: present(section.working_dir),
        user: present(section.user),
        entrypoint: section.entrypoint.unwrap_or_default(),
        cmd: section.cmd.unwrap_or_default(),
        volumes: section.volumes.unwrap_or_default().into_keys().collect(),
        labels: section.labels.unwrap_or_default(),
    };
    Ok((config, diff_ids))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_configuration() {
        let text = format!(
            r#"{{"architecture":"{}","os":"linux","config":{{"Env":["PATH=/opt/x/bin:/bin","A=b=c","noequals","=x"],
            "WorkingDir":"/app","User":"12345","Entrypoint":["/e"],"Cmd":["a","b"],"Volumes":{{"/data":{{}}}},
            "Labels":{{"k":"v"}},"ExposedPorts":{{"80/tcp":{{}}}}}},"rootfs":{{"type":"layers","diff_ids":["sha256:1"]}}}}"#,
            architecture()
        );
        let (config, diff_ids) = parse("c", text.as_bytes()).unwrap();
        assert_eq!(config.env, BTreeMap::from([("PATH".into(), "/opt/x/bin:/bin".into()), ("A".into(), "b=c".into())]));
        assert_eq!((config.workdir.as_deref(), config.user.as_deref()), (Some("/app"), Some("12345")));
        assert_eq!((config.entrypoint, config.cmd), (vec!["/e".into()], vec!["a".into(), "b".into()]));
        assert_eq!((config.volumes, config.labels["k"].as_str()), (vec!["/data".to_owned()], "v"));
        assert_eq!(diff_ids, ["sha256:1"]);
    }

    #[test]
    fn nulls_and_absence_are_the_same() {
        let nulls =
            br#"{"config":{"Env":null,"WorkingDir":"","User":"","Entrypoint":null,"Volumes":null,"Labels":null}}"#;
        for text in [&b"{}"[..], br#"{"config":null}"#, nulls] {
            assert_eq!(parse("c", text).unwrap().0, ImageConfig::default());
        }
    }

    #[test]
    fn another_machine_s_image_is_refused_by_name() {
        let error = parse("x.json", br#"{"architecture":"s390x","os":"linux"}"#).unwrap_err().to_string();
        assert!(error.contains("x.json") && error.contains("linux/s390x"), "{error}");
        assert!(parse("c", b"[").is_err());
    }
}
