//! `/proc/self/mountinfo`: where something is mounted.

/// The mount points, in order. Blanks in paths are written as `\040` and the like.
pub(super) fn mount_points(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.split(' ').nth(4)).map(unescape).collect()
}

fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (byte, rest) = match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => (byte, &part[3..]),
            None => (b'\\', part),
        };
        plain.push(byte);
        plain.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8_lossy(&plain).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_unescaped_and_stay_in_order() {
        let text = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
                    90 22 0:5 / /run/my\\040driver rw shared:1 - overlay none rw\n\
                    91 90 0:5 / /run/my\\040driver rw - overlay none rw\n";
        assert_eq!(mount_points(text), ["/", "/run/my driver", "/run/my driver"]);
    }
}
