//! The messages of `filesystem.Filesystem`, by field number for protobuf and by name for JSON.

use std::collections::BTreeMap;

use prost::Message;
use serde::{Deserialize, Serialize, Serializer};

use super::{
    process_messages::Empty,
    wire::{int64, number, or_default, Timestamp},
};

/// `StatRequest`, `MakeDirRequest`, `RemoveRequest`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct PathRequest {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "or_default")]
    pub path: String,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct MoveRequest {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "or_default")]
    pub source: String,
    #[prost(string, tag = "2")]
    #[serde(deserialize_with = "or_default")]
    pub destination: String,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ListDirRequest {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "or_default")]
    pub path: String,
    #[prost(uint32, tag = "2")]
    #[serde(deserialize_with = "number")]
    pub depth: u32,
}

/// `WatchDirRequest` and `CreateWatcherRequest`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WatchRequest {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "or_default")]
    pub path: String,
    #[prost(bool, tag = "2")]
    #[serde(deserialize_with = "or_default")]
    pub recursive: bool,
    #[prost(bool, tag = "3")]
    #[serde(alias = "include_entry", deserialize_with = "or_default")]
    pub include_entry: bool,
    #[prost(bool, tag = "4")]
    #[serde(alias = "allow_network_mounts", deserialize_with = "or_default")]
    pub allow_network_mounts: bool,
}

/// `GetWatcherEventsRequest` and `RemoveWatcherRequest`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WatcherRequest {
    #[prost(string, tag = "1")]
    #[serde(alias = "watcher_id", deserialize_with = "or_default")]
    pub watcher_id: String,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CreateWatcherResponse {
    #[prost(string, tag = "1")]
    pub watcher_id: String,
}

#[derive(Clone, PartialEq, Message, Serialize)]
pub struct GetWatcherEventsResponse {
    #[prost(message, repeated, tag = "1")]
    pub events: Vec<FilesystemEvent>,
}

/// `StatResponse`, `MakeDirResponse`, `MoveResponse`.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct EntryResponse {
    #[prost(message, optional, tag = "1")]
    pub entry: Option<EntryInfo>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ListDirResponse {
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<EntryInfo>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(enumeration = "FileType", tag = "2")]
    #[serde(rename = "type", serialize_with = "file_type")]
    pub kind: i32,
    #[prost(string, tag = "3")]
    pub path: String,
    #[prost(int64, tag = "4")]
    #[serde(with = "int64")]
    pub size: i64,
    #[prost(uint32, tag = "5")]
    pub mode: u32,
    #[prost(string, tag = "6")]
    pub permissions: String,
    #[prost(string, tag = "7")]
    pub owner: String,
    #[prost(string, tag = "8")]
    pub group: String,
    #[prost(message, optional, tag = "9")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modified_time: Option<Timestamp>,
    #[prost(string, optional, tag = "10")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    #[prost(btree_map = "string, string", tag = "11")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum FileType {
    Unspecified = 0,
    File = 1,
    Directory = 2,
    Symlink = 3,
}

fn file_type<S: Serializer>(kind: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match FileType::try_from(*kind) {
        Ok(FileType::File) => "FILE_TYPE_FILE",
        Ok(FileType::Directory) => "FILE_TYPE_DIRECTORY",
        Ok(FileType::Symlink) => "FILE_TYPE_SYMLINK",
        Ok(FileType::Unspecified) | Err(_) => "FILE_TYPE_UNSPECIFIED",
    })
}

#[derive(Clone, PartialEq, Message, Serialize)]
pub struct FilesystemEvent {
    /// Relative to the watched directory.
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(enumeration = "EventType", tag = "2")]
    #[serde(rename = "type", serialize_with = "event_type")]
    pub kind: i32,
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum EventType {
    Unspecified = 0,
    Create = 1,
    Write = 2,
    Remove = 3,
    Rename = 4,
    Chmod = 5,
}

fn event_type<S: Serializer>(kind: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match EventType::try_from(*kind) {
        Ok(EventType::Create) => "EVENT_TYPE_CREATE",
        Ok(EventType::Write) => "EVENT_TYPE_WRITE",
        Ok(EventType::Remove) => "EVENT_TYPE_REMOVE",
        Ok(EventType::Rename) => "EVENT_TYPE_RENAME",
        Ok(EventType::Chmod) => "EVENT_TYPE_CHMOD",
        Ok(EventType::Unspecified) | Err(_) => "EVENT_TYPE_UNSPECIFIED",
    })
}

#[derive(Clone, PartialEq, Message, Serialize)]
pub struct WatchDirResponse {
    #[prost(oneof = "WatchEvent", tags = "1, 2, 3")]
    #[serde(flatten)]
    pub event: Option<WatchEvent>,
}

#[derive(Clone, PartialEq, prost::Oneof, Serialize)]
#[serde(rename_all = "camelCase")]
#[allow(clippy::large_enum_variant)] // nearly every event is the large one
pub enum WatchEvent {
    #[prost(message, tag = "1")]
    Start(Empty),
    #[prost(message, tag = "2")]
    Filesystem(FilesystemEvent),
    #[prost(message, tag = "3")]
    Keepalive(Empty),
}

impl From<WatchEvent> for WatchDirResponse {
    fn from(event: WatchEvent) -> Self {
        Self { event: Some(event) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_has_the_canonical_form() {
        let entry = EntryInfo {
            name: "f".into(),
            kind: FileType::File as i32,
            path: "/f".into(),
            size: 1 << 40,
            mode: 0o644,
            permissions: "-rw-r--r--".into(),
            owner: "user".into(),
            group: "user".into(),
            modified_time: Some(Timestamp { seconds: 0, nanos: 1 }),
            symlink_target: None,
            metadata: BTreeMap::new(),
        };
        assert_eq!(
            serde_json::to_string(&entry).unwrap(),
            r#"{"name":"f","type":"FILE_TYPE_FILE","path":"/f","size":"1099511627776","mode":420,"permissions":"-rw-r--r--","owner":"user","group":"user","modifiedTime":"1970-01-01T00:00:00.000000001Z"}"#
        );
        assert_eq!(EntryInfo::decode(entry.encode_to_vec().as_slice()).unwrap(), entry);
    }

    #[test]
    fn field_names_come_in_both_spellings() {
        for text in [r#"{"path":"/","includeEntry":true}"#, r#"{"path":"/","include_entry":true,"recursive":null}"#] {
            assert!(serde_json::from_str::<WatchRequest>(text).unwrap().include_entry, "{text}");
        }
    }
}
