//! Paths and names as they cross the wire: bytes, for names in Linux are bytes.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Path, PathBuf},
};

use base64::{engine::general_purpose::STANDARD, Engine as _};
use sandmill_wire::ApiError;
use serde::{de, ser::SerializeMap, Deserialize, Deserializer, Serializer};

/// The kernel takes paths of fewer bytes than this, and so do we: what is longer cannot be named anyway.
const PATH_LIMIT_BYTES: usize = 4095;

/// A path in a request: a string, bytes (MessagePack), or `{"base64": "…"}` (JSON) where it isn't UTF-8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WirePath(Vec<u8>);

impl WirePath {
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// The text as it was given, for a link's target.
    ///
    /// Errors: 400 `invalid_argument`, 400 `path_too_long`.
    pub fn verbatim(&self) -> Result<OsString, ApiError> {
        self.check()?;
        Ok(OsString::from_vec(self.0.clone()))
    }

    /// The absolute path, with `~` and relative paths resolved against `base`.
    ///
    /// Errors: 400 `invalid_argument` (empty, NUL, another user's `~`), 400 `path_too_long`.
    pub fn resolve(&self, base: &Base) -> Result<PathBuf, ApiError> {
        self.check()?;
        let given = Path::new(OsStr::from_bytes(&self.0));
        let path = match self.0.as_slice() {
            [b'/', ..] => given.to_owned(),
            [b'~'] => base.home.clone(),
            [b'~', b'/', rest @ ..] => base.home.join(OsStr::from_bytes(trim_slashes(rest))),
            [b'~', ..] => {
                return Err(invalid(format!("{} names another user's home", super::failure::shown(given)))
                    .hint("give an absolute path, or ./~name for a file whose name begins so"))
            }
            _ => base.start.join(given),
        };
        if path.as_os_str().len() > PATH_LIMIT_BYTES {
            return Err(too_long(path.as_os_str().len()));
        }
        Ok(path)
    }

    fn check(&self) -> Result<(), ApiError> {
        if self.0.is_empty() {
            return Err(invalid("the path is empty"));
        }
        if self.0.contains(&0) {
            return Err(invalid("the path contains a NUL byte"));
        }
        if self.0.len() > PATH_LIMIT_BYTES {
            return Err(too_long(self.0.len()));
        }
        Ok(())
    }
}

fn trim_slashes(mut bytes: &[u8]) -> &[u8] {
    while let [b'/', rest @ ..] = bytes {
        bytes = rest;
    }
    bytes
}

fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::new(400, "invalid_argument", message)
}

fn too_long(length: usize) -> ApiError {
    ApiError::new(400, "path_too_long", format!("the path has {length} bytes; at most {PATH_LIMIT_BYTES} are possible"))
}

/// Where paths that aren't absolute begin.
#[derive(Debug, Clone)]
pub struct Base {
    /// What `~` stands for.
    pub home: PathBuf,
    /// Where relative paths begin.
    pub start: PathBuf,
}

impl<'de> Deserialize<'de> for WirePath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WirePathVisitor)
    }
}

struct WirePathVisitor;

impl<'de> de::Visitor<'de> for WirePathVisitor {
    type Value = WirePath;

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("a path: a string, bytes, or {\"base64\": string}")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<WirePath, E> {
        Ok(WirePath::new(text))
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<WirePath, E> {
        Ok(WirePath::new(bytes))
    }

    fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<WirePath, A::Error> {
        let Some((key, value)) = map.next_entry::<String, String>()? else {
            return Err(de::Error::missing_field("base64"));
        };
        if key != "base64" {
            return Err(de::Error::unknown_field(&key, &["base64"]));
        }
        let bytes = STANDARD.decode(value).map_err(|error| de::Error::custom(format!("not base64: {error}")))?;
        Ok(WirePath::new(bytes))
    }
}

/// Writes a name under `key`: the string where it is UTF-8. Where it isn't, MessagePack gets bytes; JSON gets the escaped
/// text (`\xff`) and, under `<key>_base64`, the exact bytes.
pub fn write_name<S: Serializer>(
    map: &mut S::SerializeMap,
    key: &'static str,
    name: &OsStr,
    human_readable: bool,
) -> Result<(), S::Error> {
    match (name.to_str(), human_readable) {
        (Some(text), _) => map.serialize_entry(key, text),
        (None, false) => map.serialize_entry(key, &Bytes(name.as_bytes())),
        (None, true) => {
            map.serialize_entry(key, &escaped(name))?;
            map.serialize_entry(&format!("{key}_base64"), &STANDARD.encode(name.as_bytes()))
        }
    }
}

/// A name as text: itself where it is UTF-8, else with its odd bytes as `\xff` and its backslashes doubled.
pub fn escaped(name: &OsStr) -> String {
    if let Some(text) = name.to_str() {
        return text.to_owned();
    }
    name.as_bytes().utf8_chunks().fold(String::new(), |mut text, chunk| {
        text.push_str(&chunk.valid().replace('\\', "\\\\"));
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
        text
    })
}

struct Bytes<'a>(&'a [u8]);

impl serde::Serialize for Bytes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> Base {
        Base { home: "/home/user".into(), start: "/app".into() }
    }

    fn resolved(path: &str) -> Result<String, String> {
        let path = WirePath::new(path).resolve(&base()).map_err(|error| error.code)?;
        Ok(path.to_str().unwrap().to_owned())
    }

    #[test]
    fn paths_begin_where_they_should() {
        assert_eq!(resolved("/a/b").unwrap(), "/a/b");
        assert_eq!(resolved("a").unwrap(), "/app/a");
        assert_eq!(resolved("~").unwrap(), "/home/user");
        assert_eq!(resolved("~//a").unwrap(), "/home/user/a");
        assert_eq!(resolved("./~x").unwrap(), "/app/./~x");
        assert_eq!(resolved("~root/a").unwrap_err(), "invalid_argument");
    }

    #[test]
    fn what_the_kernel_cannot_name_is_refused() {
        assert_eq!(resolved("").unwrap_err(), "invalid_argument");
        assert_eq!(resolved("a\0b").unwrap_err(), "invalid_argument");
        assert_eq!(resolved(&"a/".repeat(2100)).unwrap_err(), "path_too_long");
    }

    #[test]
    fn odd_bytes_come_in_both_formats() {
        let path: WirePath = serde_json::from_str(r#"{"base64":"L3RtcC//"}"#).unwrap();
        assert_eq!(path, WirePath::new(*b"/tmp/\xff"));
        let path: WirePath = rmp_serde::from_slice(b"\xc4\x02/\xff").unwrap();
        assert_eq!(path, WirePath::new(*b"/\xff"));
        assert_eq!(escaped(OsStr::from_bytes(b"a\\\xff")), "a\\\\\\xff");
        assert_eq!(escaped(OsStr::new("a\\b")), "a\\b");
    }
}
