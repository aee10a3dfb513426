//! `strftime_now`: the current time in a template, as Python's `strftime` writes it.
//!
//! transformers takes the machine's local time. Here it is UTC, so that servers in different zones make the same prompts. Names are
//! English. Other codes than those below are refused: an answer to a wrong date would not be noticed.
use super::limits::{refuse, spend};
use minijinja::Error;

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// No code has a longer text, per byte of the format: `%c` writes 24 bytes.
const BYTES_PER_BYTE: usize = 16;

/// The current time in UTC.
pub(super) fn strftime_now(format: String) -> Result<String, Error> {
    spend(format.len().saturating_mul(BYTES_PER_BYTE))?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    strftime(&format, now.as_secs(), now.subsec_micros())
}

/// Writes `seconds` since 1970-01-01 in UTC, and `micros` of the next one.
///
/// # Errors
/// The format has a code that kvist does not know.
fn strftime(format: &str, seconds: u64, micros: u32) -> Result<String, Error> {
    let days = (seconds / 86_400) as i64;
    let (year, month, day) = civil_from_days(days);
    let second = seconds % 86_400;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let weekday = (days + 4).rem_euclid(7) as usize; // 1970-01-01 was a Thursday
    let of_year = days - days_from_first(year) + 1;
    let (hour_12, month_name) = ((hour + 11) % 12 + 1, MONTHS[month as usize - 1]);
    let again = |format: &str| strftime(format, seconds, micros);
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        // `%-d`: a number without padding.
        let mut code = rest.next();
        let bare = code == Some('-');
        if bare {
            code = rest.next();
        }
        let padded = |n: u64, width: usize| if bare { n.to_string() } else { format!("{n:0width$}") };
        let spaced = |n: u64| if bare { n.to_string() } else { format!("{n:2}") };
        out += &match code {
            Some('Y') => year.to_string(),
            Some('y') => padded(year.rem_euclid(100) as u64, 2),
            Some('m') => padded(month.into(), 2),
            Some('d') => padded(day.into(), 2),
            Some('e') => spaced(day.into()),
            Some('j') => padded(of_year as u64, 3),
            Some('H') => padded(hour, 2),
            Some('I') => padded(hour_12, 2),
            Some('k') => spaced(hour),
            Some('l') => spaced(hour_12),
            Some('M') => padded(minute, 2),
            Some('S') => padded(second, 2),
            Some('f') => format!("{micros:06}"),
            Some('w') => weekday.to_string(),
            Some('u') => ((weekday + 6) % 7 + 1).to_string(),
            Some('B') => month_name.into(),
            Some('b' | 'h') => month_name[..3].into(),
            Some('A') => DAYS[weekday].into(),
            Some('a') => DAYS[weekday][..3].into(),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('D' | 'x') => again("%m/%d/%y")?,
            Some('F') => again("%Y-%m-%d")?,
            Some('T' | 'X') => again("%H:%M:%S")?,
            Some('R') => again("%H:%M")?,
            Some('c') => again("%a %b %e %H:%M:%S %Y")?,
            Some('Z' | 'z') => String::new(), // as of a time without a zone
            Some('%') => "%".into(),
            other => {
                let code = other.map_or(String::new(), String::from);
                return Err(refuse(format!("strftime_now: kvist does not know the code `%{code}`")));
            }
        };
    }
    Ok(out)
}

/// Days from 1970-01-01 to the first day of a year.
fn days_from_first(year: i64) -> i64 {
    let before = year - 1;
    let leap_days = |year: i64| year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    (year - 1970) * 365 + leap_days(before) - leap_days(1969)
}

/// Converts days since 1970-01-01 to (year, month, day), proleptic Gregorian (Hinnant, "chrono-compatible low-level
/// date algorithms").
fn civil_from_days(days: i64) -> (i64, u32, u32) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153; // March is 0
    let day = (day_of_year - (153 * shifted + 2) / 5 + 1) as u32;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 } as u32;
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::{civil_from_days, strftime};

    #[test]
    fn days_become_dates() {
        for (days, date) in
            [(0, (1970, 1, 1)), (19_782, (2024, 2, 29)), (20_778, (2026, 11, 21)), (-1, (1969, 12, 31))]
        {
            assert_eq!(civil_from_days(days), date, "day {days}");
        }
    }

    /// Regression: most codes stayed in the prompt as they were: `Today is %A`. The expected texts are Python's.
    #[test]
    fn times_are_written_as_python_writes_them() {
        let thursday = 19_782 * 86_400 + 13 * 3600 + 4 * 60 + 9; // 2024-02-29 13:04:09
        for (format, expected) in [
            ("%d %b %Y", "29 Feb 2024"),
            ("%A, %B %d, %y%%", "Thursday, February 29, 24%"),
            ("%a %H:%M:%S.%f %j", "Thu 13:04:09.000042 060"),
            ("%I %p, %-I, %l|%k", "01 PM, 1,  1|13"),
            ("%F %T %R %D", "2024-02-29 13:04:09 13:04 02/29/24"),
            ("%c%Z%z", "Thu Feb 29 13:04:09 2024"),
            ("%x %X %w %u %h", "02/29/24 13:04:09 4 4 Feb"),
            ("é %-m %e", "é 2 29"),
        ] {
            assert_eq!(strftime(format, thursday, 42).unwrap(), expected, "{format}");
        }
        // Midnight of Sunday, 2000-01-02, and the last second of 1999.
        let sunday = 10_958 * 86_400;
        assert_eq!(strftime("%a %u %w %e|%-d %I %p %-M %j", sunday, 0).unwrap(), "Sun 7 0  2|2 12 AM 0 002");
        assert_eq!(strftime("%F %T %j", sunday - 86_401, 0).unwrap(), "1999-12-31 23:59:59 365");
        for format in ["%Q", "%", "a %-", "%-Ü", "%E"] {
            let error = strftime(format, sunday, 0).unwrap_err().to_string();
            assert!(error.contains("strftime_now"), "{format}: {error}");
        }
    }
}
