"""A validation for machines that build: JUnit XML, and Markdown for a job's summary."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

from tieq.report.markdown import markdown_table
from tieq.report.tables import (
    CHECK_HEADER,
    FILE_HEADER,
    RUNTIME_HEADER,
    check_rows,
    file_rows,
    runtime_rows,
)


def junit_xml(checks: dict[str, Any]) -> str:
    """One test case a gate. Source: the JUnit XML schema of Apache Ant, as CI servers read it."""
    failed = sum(not check["passed"] for check in checks["checks"])
    suite = ET.Element(
        "testsuite", name="tieq validate", tests=str(len(checks["checks"])), failures=str(failed), errors="0"
    )
    for check in checks["checks"]:
        case = ET.SubElement(suite, "testcase", classname=f"tieq.{check['subject']}", name=check["name"])
        said = f"{check['value']}, {check['bound']}"
        if not check["passed"]:
            failure = ET.SubElement(case, "failure", message=said)
            failure.text = check["detail"] or said
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def job_summary(checks: dict[str, Any]) -> str:
    """GitHub-flavoured Markdown: the verdict, the gates that failed, files, runtimes, all gates."""
    lines = ["# tieq: " + ("all gates hold" if checks["passed"] else "a gate failed"), ""]
    lines += [
        f"- **{check['name']}** ({check['subject']}): {check['value']}, {check['bound']}. {check['detail']}".rstrip()
        for check in checks["checks"]
        if not check["passed"]
    ]
    parts = [(FILE_HEADER, file_rows(checks)), (CHECK_HEADER, check_rows(checks))]
    if checks["runtimes"]:
        parts.insert(1, (RUNTIME_HEADER, runtime_rows(checks)))
    return "\n\n".join(["\n".join(lines).rstrip(), *(markdown_table(header, rows) for header, rows in parts)]) + "\n"
