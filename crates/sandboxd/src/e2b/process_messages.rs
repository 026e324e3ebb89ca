//! The messages of `process.Process`, by field number for protobuf and by name for JSON.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Message;
use serde::{Deserialize, Serialize};

use super::wire::{base64, number, or_default};

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct Size {
    #[prost(uint32, tag = "1")]
    #[serde(deserialize_with = "number")]
    pub cols: u32,
    #[prost(uint32, tag = "2")]
    #[serde(deserialize_with = "number")]
    pub rows: u32,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct Pty {
    #[prost(message, optional, tag = "1")]
    pub size: Option<Size>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessConfig {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "or_default")]
    pub cmd: String,
    #[prost(string, repeated, tag = "2")]
    #[serde(deserialize_with = "or_default")]
    pub args: Vec<String>,
    #[prost(btree_map = "string, string", tag = "3")]
    #[serde(deserialize_with = "or_default")]
    pub envs: BTreeMap<String, String>,
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
pub struct ListRequest {}

#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ProcessInfo {
    #[prost(message, optional, tag = "1")]
    pub config: Option<ProcessConfig>,
    #[prost(uint32, tag = "2")]
    pub pid: u32,
    #[prost(string, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pub processes: Vec<ProcessInfo>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct StartRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessConfig>,
    #[prost(message, optional, tag = "2")]
    pub pty: Option<Pty>,
    #[prost(string, optional, tag = "3")]
    pub tag: Option<String>,
    /// Open unless it says false: clients from before this field count on it.
    #[prost(bool, optional, tag = "4")]
    pub stdin: Option<bool>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessSelector {
    #[prost(oneof = "Selector", tags = "1, 2")]
    #[serde(flatten)]
    pub selector: Option<Selector>,
}

#[derive(Clone, PartialEq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Selector {
    #[prost(uint32, tag = "1")]
    Pid(#[serde(deserialize_with = "number")] u32),
    #[prost(string, tag = "2")]
    Tag(String),
}

/// `ConnectRequest`, `CloseStdinRequest` and `StreamInputRequest.StartEvent`: which process.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct Selected {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct UpdateRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
    #[prost(message, optional, tag = "2")]
    pub pty: Option<Pty>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessInput {
    #[prost(oneof = "Input", tags = "1, 2")]
    #[serde(flatten)]
    pub input: Option<Input>,
}

#[derive(Clone, PartialEq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Input {
    #[prost(bytes = "bytes", tag = "1")]
    Stdin(#[serde(with = "base64")] Bytes),
    #[prost(bytes = "bytes", tag = "2")]
    Pty(#[serde(with = "base64")] Bytes),
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct SendInputRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
    #[prost(message, optional, tag = "2")]
    pub input: Option<ProcessInput>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct StreamInputRequest {
    #[prost(oneof = "StreamInput", tags = "1, 2, 3")]
    #[serde(flatten)]
    pub event: Option<StreamInput>,
}

#[derive(Clone, PartialEq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StreamInput {
    #[prost(message, tag = "1")]
    Start(Selected),
    #[prost(message, tag = "2")]
    Data(StreamInputData),
    #[prost(message, tag = "3")]
    Keepalive(Empty),
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct StreamInputData {
    #[prost(message, optional, tag = "2")]
    pub input: Option<ProcessInput>,
}

#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct SendSignalRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
    #[prost(int32, tag = "2")]
    #[serde(deserialize_with = "signal")]
    pub signal: i32,
}

/// An enum's name or its number.
fn signal<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Given {
        Number(i32),
        Name(String),
        Null(()),
    }
    Ok(match Given::deserialize(deserializer)? {
        Given::Number(number) => number,
        Given::Name(name) => match name.as_str() {
            "SIGNAL_SIGKILL" => libc::SIGKILL,
            "SIGNAL_SIGTERM" => libc::SIGTERM,
            _ => 0,
        },
        Given::Null(()) => 0,
    })
}

/// Every answer and event without fields.
#[derive(Clone, Copy, PartialEq, Eq, Message, Serialize, Deserialize)]
pub struct Empty {}

/// `StartResponse` and `ConnectResponse`.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct EventResponse {
    #[prost(message, optional, tag = "1")]
    pub event: Option<ProcessEvent>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ProcessEvent {
    #[prost(oneof = "Event", tags = "1, 2, 3, 4")]
    #[serde(flatten)]
    pub event: Option<Event>,
}

#[derive(Clone, PartialEq, prost::Oneof, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Event {
    #[prost(message, tag = "1")]
    Start(StartEvent),
    #[prost(message, tag = "2")]
    Data(DataEvent),
    #[prost(message, tag = "3")]
    End(EndEvent),
    #[prost(message, tag = "4")]
    Keepalive(Empty),
}

#[derive(Clone, PartialEq, Message, Serialize)]
pub struct StartEvent {
    #[prost(uint32, tag = "1")]
    pub pid: u32,
}

#[derive(Clone, PartialEq, Message, Serialize)]
pub struct DataEvent {
    #[prost(oneof = "Output", tags = "1, 2, 3")]
    #[serde(flatten)]
    pub output: Option<Output>,
}

#[derive(Clone, PartialEq, prost::Oneof, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Output {
    #[prost(bytes = "bytes", tag = "1")]
    Stdout(#[serde(with = "base64")] Bytes),
    #[prost(bytes = "bytes", tag = "2")]
    Stderr(#[serde(with = "base64")] Bytes),
    #[prost(bytes = "bytes", tag = "3")]
    Pty(#[serde(with = "base64")] Bytes),
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndEvent {
    #[prost(sint32, tag = "1")]
    pub exit_code: i32,
    /// Whether it ended by itself; false when a signal ended it.
    #[prost(bool, tag = "2")]
    pub exited: bool,
    #[prost(string, tag = "3")]
    pub status: String,
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl From<Event> for EventResponse {
    fn from(event: Event) -> Self {
        Self { event: Some(ProcessEvent { event: Some(event) }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_read_as_the_clients_write_it() {
        let request: StartRequest = serde_json::from_str(
            r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","true"],"envs":{"A":"b"}},"stdin":false,"new":1}"#,
        )
        .unwrap();
        let config = request.process.clone().unwrap();
        assert_eq!((config.cmd.as_str(), config.args.len(), config.cwd), ("/bin/bash", 3, None));
        assert_eq!(request.stdin, Some(false));
        assert_eq!(StartRequest::decode(request.encode_to_vec().as_slice()).unwrap(), request);
    }

    #[test]
    fn selectors_and_input_are_oneofs() {
        let request: SendInputRequest =
            serde_json::from_str(r#"{"process":{"pid":"12"},"input":{"stdin":"aGk"}}"#).unwrap();
        assert_eq!(request.process.unwrap().selector, Some(Selector::Pid(12)));
        assert_eq!(request.input.unwrap().input, Some(Input::Stdin("hi".into())));
        let request: Selected = serde_json::from_str(r#"{"process":{}}"#).unwrap();
        assert_eq!(request.process.unwrap().selector, None);
        let request: SendSignalRequest =
            serde_json::from_str(r#"{"process":{"tag":"x"},"signal":"SIGNAL_SIGKILL"}"#).unwrap();
        assert_eq!(request.signal, 9);
    }

    #[test]
    fn events_have_the_canonical_form() {
        let json = |event: Event| serde_json::to_string(&EventResponse::from(event)).unwrap();
        assert_eq!(json(Event::Start(StartEvent { pid: 7 })), r#"{"event":{"start":{"pid":7}}}"#);
        assert_eq!(json(Event::Keepalive(Empty {})), r#"{"event":{"keepalive":{}}}"#);
        assert_eq!(
            json(Event::Data(DataEvent { output: Some(Output::Stderr("hi".into())) })),
            r#"{"event":{"data":{"stderr":"aGk="}}}"#
        );
        let end = EndEvent { exit_code: 3, exited: true, status: "exit status 3".into(), error: None };
        assert_eq!(json(Event::End(end)), r#"{"event":{"end":{"exitCode":3,"exited":true,"status":"exit status 3"}}}"#);
    }
}
