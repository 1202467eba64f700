//! Which vfio driver is the right one for a device: the one whose alias matches with the fewest wildcards.

/// The fields of a PCI alias, in their order.
const FIELDS: [&str; 7] = ["v", "d", "sv", "sd", "bc", "sc", "i"];
/// How lines begin that are about vfio.
const ALIAS: &str = "alias vfio_pci:";
/// What fits every device.
const DEFAULT: &str = "vfio-pci";

/// The best driver for a device among the lines of `modules.alias`.
pub(crate) fn best_driver(aliases: &str, modalias: &str) -> String {
    let Some(device) = modalias.strip_prefix("pci:").and_then(fields) else { return DEFAULT.to_owned() };
    let candidate = |line: &str| {
        let (pattern, driver) = line.strip_prefix(ALIAS)?.split_once(char::is_whitespace)?;
        Some((wildcards(&fields(pattern)?, &device)?, driver.trim().to_owned()))
    };
    aliases.lines().filter_map(candidate).min().map_or_else(|| DEFAULT.to_owned(), |(_, driver)| driver)
}

/// The values of the fields; `None` if one is missing or there is more.
fn fields(text: &str) -> Option<Vec<&str>> {
    let mut rest = text.strip_prefix(FIELDS[0])?;
    let mut values = Vec::new();
    for next in &FIELDS[1..] {
        // Values are `*` or capital hexadecimal digits, names are small letters.
        let end = rest.find(|c: char| c.is_ascii_lowercase())?;
        let (value, after) = rest.split_at(end);
        values.push(value);
        rest = after.strip_prefix(next)?;
    }
    values.push(rest);
    let valid =
        |value: &&str| *value == "*" || (!value.is_empty() && value.chars().all(|c| c.is_ascii_hexdigit()));
    values.iter().all(valid).then_some(values)
}

/// How many wildcards a pattern needs for a device; `None` if it does not match.
fn wildcards(pattern: &[&str], device: &[&str]) -> Option<usize> {
    let matches = |(wanted, is): (&&str, &&str)| *wanted == "*" || wanted.eq_ignore_ascii_case(is);
    let fits = pattern.iter().zip(device).all(matches);
    fits.then(|| pattern.iter().filter(|value| **value == "*").count())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "pci:v000010DEd00002342sv000010DEsd000016EBbc03sc02i00";

    #[test]
    fn the_most_exact_alias_wins() {
        let aliases = "alias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia\n\
                       alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci\n\
                       alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci\n\
                       alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci\n";
        assert_eq!(best_driver(aliases, GPU), "nvgrace_gpu_vfio_pci");
        assert_eq!(best_driver(aliases, "pci:v000010DEd00002330sv0sd0bc03sc02i00"), "vfio_pci");
        assert_eq!(best_driver("", GPU), "vfio-pci");
    }

    #[test]
    fn what_is_no_alias_is_none() {
        for text in ["", "v", "v*d*", "v*d*sv*sd*bc*sc*", "v*d*sv*sd*bc*sc*ixyz", "d*v*sv*sd*bc*sc*i*"] {
            assert_eq!(fields(text), None, "{text}");
        }
        assert_eq!(fields("v*d*sv*sd*bc*sc*i*").unwrap().len(), 7);
        assert_eq!(best_driver("alias vfio_pci:v*d*sv*sd*bc*sc*i* x", "usb:v1234"), "vfio-pci");
    }

    #[test]
    fn wildcards_are_counted() {
        let device = fields("v000010DEd00002342sv000010DEsd000016EBbc03sc02i00").unwrap();
        for (pattern, count) in [
            ("v*d*sv*sd*bc*sc*i*", Some(7)),
            ("v000010DEd00002342sv*sd*bc*sc*i*", Some(5)),
            ("v000010DEd00002342sv000010DEsd000016EBbc03sc02i00", Some(0)),
            ("v000010DEd00002343sv*sd*bc*sc*i*", None),
        ] {
            assert_eq!(wildcards(&fields(pattern).unwrap(), &device), count, "{pattern}");
        }
    }
}
