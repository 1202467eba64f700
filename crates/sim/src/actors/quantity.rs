//! Kubernetes quantities as thousandths: `500m`, `8`, `64Gi`.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The quantity in thousandths; what cannot be read counts as nothing.
pub(super) fn milli(quantity: &Quantity) -> i64 {
    let text = quantity.0.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let scale: i64 = match suffix {
        "m" => 1,
        "" => 1000,
        "k" => 1_000_000,
        "M" => 1_000_000_000,
        "G" => 1_000_000_000_000,
        "T" => 1_000_000_000_000_000,
        "Ki" => 1000 << 10,
        "Mi" => 1000 << 20,
        "Gi" => 1000 << 30,
        "Ti" => 1000 << 40,
        _ => 0,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let whole = whole.parse::<i64>().unwrap_or(0).saturating_mul(scale);
    let thousandths = format!("{fraction:0<3}")[..3].parse::<i64>().unwrap_or(0);
    whole.saturating_add(thousandths.saturating_mul(scale / 1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_are_understood() {
        let cases = [
            ("8", 8000),
            ("500m", 500),
            ("1.5", 1500),
            ("2Ki", 2_048_000),
            ("1G", 1_000_000_000_000),
            ("x", 0),
        ];
        for (text, expected) in cases {
            assert_eq!(milli(&Quantity(text.into())), expected, "{text}");
        }
    }
}
