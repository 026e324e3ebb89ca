//! The frames in which output is streamed: u32be length + MessagePack.

use serde::Serialize;

use super::subscription::Event;
use crate::proc::Outcome;

#[derive(Serialize)]
#[serde(tag = "t")]
enum Frame<'a> {
    #[serde(rename = "gap")]
    Gap { s: &'a str, off: u64, n: u64 },
    #[serde(rename = "end")]
    End { r: &'a Outcome },
    #[serde(rename = "ka")]
    KeepAlive,
}

/// Output, the frequent frame, has its stream's letter as its type.
#[derive(Serialize)]
struct Output<'a> {
    t: &'a str,
    off: u64,
    #[serde(serialize_with = "as_bytes")]
    d: &'a [u8],
}

fn as_bytes<S: serde::Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

/// One event as a frame.
pub fn event(event: &Event) -> Vec<u8> {
    match event {
        Event::Output { stream, offset, data } => {
            framed(data.len() + 32, &Output { t: stream.letter(), off: *offset, d: data })
        }
        Event::Gap { stream, offset, missing } => {
            framed(48, &Frame::Gap { s: stream.letter(), off: *offset, n: *missing })
        }
        Event::End(outcome) => framed(256, &Frame::End { r: outcome }),
    }
}

/// The frame that says that nothing happens, but that the connection is alive.
pub fn keep_alive() -> Vec<u8> {
    framed(16, &Frame::KeepAlive)
}

fn framed<T: Serialize>(capacity: usize, value: &T) -> Vec<u8> {
    let mut frame = Vec::with_capacity(capacity);
    frame.extend_from_slice(&[0; 4]);
    // A Vec takes every byte, and our types have no form that MessagePack lacks.
    let _ = value.serialize(&mut rmp_serde::Serializer::new(&mut frame).with_struct_map());
    let length = (frame.len() - 4) as u32;
    frame[..4].copy_from_slice(&length.to_be_bytes());
    frame
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proc::Stream;

    #[test]
    fn output_is_a_map_with_binary_data() {
        let frame = event(&Event::Output { stream: Stream::Stdout, offset: 7, data: vec![0xff].into() });
        assert_eq!(frame, b"\0\0\0\x0f\x83\xa1t\xa1o\xa3off\x07\xa1d\xc4\x01\xff");
    }

    #[test]
    fn the_other_frames_name_their_type() {
        let gap = event(&Event::Gap { stream: Stream::Stderr, offset: 1, missing: 2 });
        assert_eq!(&gap[4..], b"\x84\xa1t\xa3gap\xa1s\xa1e\xa3off\x01\xa1n\x02");
        assert_eq!(&keep_alive()[4..], b"\x81\xa1t\xa2ka");
    }
}
