//! proto3's JSON, as far as serde's own ways differ from it.
//!
//! Input is taken leniently, as protobuf's JSON demands: numbers may be strings, null is the default, bytes may be base64 of
//! either alphabet, with or without padding. Output follows the canonical form.

use std::{fmt, str::FromStr};

use serde::{de, Deserialize, Deserializer, Serializer};

/// Null is the default.
pub fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// A number, or a number in a string, or null.
pub fn number<'de, D: Deserializer<'de>, T: FromStr + TryFrom<u64> + Default>(deserializer: D) -> Result<T, D::Error> {
    struct Visitor<T>(std::marker::PhantomData<T>);
    impl<T: FromStr + TryFrom<u64> + Default> de::Visitor<'_> for Visitor<T> {
        type Value = T;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a number that is not negative")
        }

        fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
            T::try_from(number).map_err(|_| de::Error::invalid_value(de::Unexpected::Unsigned(number), &self))
        }

        fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
            u64::try_from(number)
                .map_err(|_| de::Error::invalid_value(de::Unexpected::Signed(number), &self))
                .and_then(|number| self.visit_u64(number))
        }

        fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
            if number.fract() != 0.0 || !(0.0..=9e15).contains(&number) {
                return Err(de::Error::invalid_value(de::Unexpected::Float(number), &self));
            }
            self.visit_u64(number as u64)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(|_| de::Error::invalid_value(de::Unexpected::Str(text), &self))
        }

        fn visit_unit<E: de::Error>(self) -> Result<T, E> {
            Ok(T::default())
        }
    }
    deserializer.deserialize_any(Visitor(std::marker::PhantomData))
}

/// 64 bit numbers are strings.
pub mod int64 {
    use super::*;

    pub fn serialize<S: Serializer>(value: &i64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }
}

pub mod base64 {
    use ::base64::{
        alphabet,
        engine::general_purpose::STANDARD,
        engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
        Engine as _,
    };

    use super::*;

    const LENIENT: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    const ANY_STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
    const ANY_URL: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

    pub fn serialize<S: Serializer>(bytes: &bytes::Bytes, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(bytes))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bytes::Bytes, D::Error> {
        let text = String::deserialize(deserializer)?;
        ANY_STANDARD
            .decode(&text)
            .or_else(|_| ANY_URL.decode(&text))
            .map(Into::into)
            .map_err(|error| de::Error::custom(format!("not base64: {error}")))
    }
}

/// A moment, as `google.protobuf.Timestamp`.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Timestamp {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

impl fmt::Display for Timestamp {
    /// RFC 3339, in UTC.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (days, second) = (self.seconds.div_euclid(86400), self.seconds.rem_euclid(86400));
        let (year, month, day) = civil(days);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(formatter, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:09}Z", self.nanos)
    }
}

impl serde::Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The Gregorian date of a day counted from 1970-01-01 (Howard Hinnant's `civil_from_days`).
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(default)]
    struct Sample {
        #[serde(deserialize_with = "number")]
        pid: u32,
        #[serde(deserialize_with = "or_default")]
        name: String,
    }

    #[test]
    fn numbers_come_in_any_shape() {
        for text in [r#"{"pid":7}"#, r#"{"pid":"7"}"#, r#"{"pid":7.0,"name":null,"unknown":[1]}"#] {
            assert_eq!(serde_json::from_str::<Sample>(text).unwrap(), Sample { pid: 7, name: String::new() });
        }
        assert_eq!(serde_json::from_str::<Sample>(r#"{"pid":null}"#).unwrap().pid, 0);
        for text in [r#"{"pid":-1}"#, r#"{"pid":"x"}"#, r#"{"pid":1.5}"#, r#"{"pid":4294967296}"#] {
            assert!(serde_json::from_str::<Sample>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn moments_are_written_in_utc() {
        let shown = |seconds, nanos| Timestamp { seconds, nanos }.to_string();
        assert_eq!(shown(0, 0), "1970-01-01T00:00:00.000000000Z");
        assert_eq!(shown(951_782_400, 5), "2000-02-29T00:00:00.000000005Z");
        assert_eq!(shown(-1, 999_999_999), "1969-12-31T23:59:59.999999999Z");
        assert_eq!(shown(1_796_131_215, 0), "2026-12-01T13:20:15.000000000Z");
    }
}
